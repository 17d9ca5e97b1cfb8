"""SRPO: failures are rewarded by their likeness to successes of their own group, however groups
are divided.
"""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch

from siirl_dask.config import ModelConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import DataError
from siirl_dask.nodes import embed_texts, score_by_similarity
from siirl_dask.training import build_encoder
from tests.nodes.test_learning_nodes import context, on_workers, rows
from tests.training.test_encoder import write_encoder

pytest.importorskip("sklearn")


def table(**others):
    """Group 0: three successes close together, one far off and three failures. 1: no success. 2:
    no failure.
    """
    given = {
        "group_id": [0] * 7 + [1, 1, 2, 2],
        "reward": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
        "embedding": [[0, 0], [0, 1], [0, 2], [40, 0], [0, 1], [0, 5], [0, 3]]
        + [[9, 9], [1, 1]] * 2,
    }
    return rows(**given | others)


def test_failures_by_hand():
    # standardised, neighbours are apart by 1.2 and the last success by 2.3: no cluster with eps .5,
    # one with eps 1.5
    mean, clustered = (10, 0.75), (0, 1)
    for eps, centre in ((0.5, mean), (1.5, clustered)):
        given = score_by_similarity(context(), table(), eps=eps)["reward"].to_pylist()
        distances = [np.hypot(x - centre[0], y - centre[1]) for x, y in ((0, 1), (0, 5), (0, 3))]
        scaled = [(d - min(distances)) / (max(distances) - min(distances)) for d in distances]
        expected = [0.6 / (1 + np.exp(-10 * (0.5 - d))) for d in scaled]
        assert given == pytest.approx([1, 1, 1, 1, *expected, 0, 0, 1, 1], abs=1e-6)
        assert given[4] == pytest.approx(0.595984, abs=1e-6)
        assert given[5] == pytest.approx(0.004016, abs=1e-6)


def test_the_reward_does_not_depend_on_how_many_workers_there_are():
    whole = score_by_similarity(context(), table())
    mixed = table().take([9, 4, 2, 10, 7, 0, 5, 1, 3, 8, 6])
    groups = mixed["group_id"].to_numpy()
    parts = [mixed.filter(pa.array(groups == group)) for group in range(3)]
    split, _ = on_workers(score_by_similarity, [*parts, mixed.slice(0, 0)])
    assert split.sort_by("row_id").equals(whole)


def test_an_episode_of_several_rows_is_one():
    cut = rows(
        group_id=[0] * 5,
        episode_id=[0, 1, 1, 2, 3],
        segment=[0, 0, 1, 0, 0],
        reward=[1.0, 0.0, 0.0, 0.0, 0.0],
        embedding=[[0, 0], [0, 0], [0, 4], [0, 3], [0, 9]],
    )
    whole = rows(
        group_id=[0] * 4, reward=[1.0, 0, 0, 0], embedding=[[0, 0], [0, 2], [0, 3], [0, 9]]
    )
    one, other = (
        score_by_similarity(context(), given)["reward"].to_pylist() for given in (cut, whole)
    )
    assert [one[0], one[1] + one[2], *one[3:]] == pytest.approx(other)


def test_what_counts_as_a_success_may_be_said():
    given = score_by_similarity(context(), table(reward=[0.5] * 4 + [0.2] * 7), success=0.5)[
        "reward"
    ].to_pylist()
    assert given[:4] == [1, 1, 1, 1]
    assert given[7:] == [0, 0, 0, 0]


def test_a_row_without_a_reward_gets_none():
    failed = table(reward=[None, 1.0, 1.0, 1.0, 0, 0, 0, 0, 0, 1, 1])
    given = score_by_similarity(context(), failed)["reward"].to_pylist()
    assert given[0] is None
    assert given[4] > given[5]


def test_embeddings_of_different_widths_are_refused():
    with pytest.raises(DataError, match=r"widths \[1, 2\]"):
        score_by_similarity(
            context(), rows(group_id=[0, 0], reward=[1.0, 0.0], embedding=[[1], [1, 2]])
        )


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("siirl_dask.nodes.advantages.similarity.find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install 'siirl_dask\[srpo\]'"):
        score_by_similarity.__contract__.trial()


def test_texts_that_resemble_a_success_are_rewarded_more(tmp_path):
    encoder = build_encoder(
        Device("w"),
        Rank(),
        model=ModelConfig(path=str(write_encoder(tmp_path / "model"))),
        max_tokens=32,
    )
    texts = ["low up up high", "low up mid high", "low up up up high", "down down down", "mid down"]
    given = rows(group_id=[0] * 5, reward=[1.0, 1.0, 0.0, 0.0, 0.0]).append_column(
        "response", pa.array(texts)
    )
    embedded = embed_texts(context(encoder), given)
    split, _ = on_workers(embed_texts, [given.slice(0, 2), given.slice(2)], [encoder, encoder])
    assert split.equals(embedded)
    rewards = score_by_similarity(context(), embedded)["reward"].to_pylist()
    assert rewards[:2] == [1, 1]
    assert rewards[2] == pytest.approx(0.595984, abs=1e-6)
    assert max(rewards[3:]) < 0.3


def test_several_columns_are_one_text(tmp_path):
    seen = []

    class Encoder:
        def embeddings(self, texts):
            seen.extend(texts)
            return torch.zeros(len(texts), 2)

    given = rows(group_id=[0]).append_column("prompt", pa.array(["p"]))
    given = given.append_column("response", pa.array([None], pa.string()))
    partial(embed_texts, columns=("prompt", "response"))(context(Encoder()), given)
    assert seen == ["p\n"]
