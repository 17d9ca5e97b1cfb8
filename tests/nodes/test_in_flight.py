"""Rows of nodes whose weights change while they generate: the versions of tokens, over steps too."""

import pyarrow as pa
import pytest
from torch import nn

from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.nodes import generate
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.schema import TYPES
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.in_flight import ScriptedWeights
from siirl_dask.testing.reference_model import load_model

LIMIT = 9


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[int, nn.Module]:
    folders = [tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in (1, 2)]
    return {version: load_model(folder) for version, folder in enumerate(folders)}


@pytest.fixture
def engine(models, tmp_path_factory):
    return TransformersEngine(ModelConfig(path=models[0].config.name_or_path))


def rollout(**changes):
    return RolloutConfig(
        n=2, max_response_length=LIMIT, max_staleness=8, in_flight=True, engine="transformers",
        **changes,
    )  # fmt: skip


def prompts():
    ids = pa.array(range(3), pa.int64())
    columns = {"row_id": ids, "group_id": ids, "tokens": ids, "prompt_ids": [[5, 6], [7], [8, 9]]}
    return pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})


def context(engine, arriving, step=1, **more):
    return Context(
        step=step, run_seed=0, rank=Rank(), device=Device("w"), resource=engine,
        arriving_weights=arriving, **more,
    )  # fmt: skip


def test_a_rows_version_is_its_first_tokens_and_each_token_has_its_own(engine, models):
    plain = generate(context(engine, None), prompts(), rollout=rollout()).to_pylist()
    arriving = ScriptedWeights(engine, models, [(4, 1)])
    rows = generate(context(engine, arriving), prompts(), rollout=rollout()).to_pylist()
    spans = [row["token_versions"] for row in rows]
    assert [0, 0, 0, 1, 1, 1, 1, 1, 1] in spans
    for row, before in zip(rows, plain, strict=True):
        assert row["weights_version"] == 0
        assert before["token_versions"] == [0] * len(before["response_ids"])
        assert row["response_ids"][:3] == before["response_ids"][:3]
        assert len(row["token_versions"]) == len(row["response_ids"])
    assert [row["response_ids"] for row in rows] != [row["response_ids"] for row in plain]


def test_a_response_over_two_steps_has_the_versions_of_both(engine, models):
    budget = rollout(partial=True, max_tokens_per_step=5)
    state = {}
    arriving = ScriptedWeights(engine, models, [(3, 1)])
    first = generate(context(engine, arriving, state=state), prompts(), rollout=budget)
    later = ScriptedWeights(engine, models, [])
    last = context(engine, later, step=2, state=state, drain=True)
    rows = [*first.to_pylist(), *generate(last, prompts().slice(0, 0), rollout=budget).to_pylist()]
    assert len(rows) == 6
    spans = {tuple(row["token_versions"]) for row in rows}
    assert (0, 0, 1, 1, 1, 1, 1, 1, 1) in spans
    assert {row["weights_version"] for row in rows} == {0}


def test_an_engine_that_cannot_is_a_mistake_of_its_spec(models):
    class Plain:
        version = 0

        def serve(self, queue): ...

    with pytest.raises(TypeError, match="Plain has no serve_in_flight"):
        generate(context(Plain(), ScriptedWeights(None, models, [])), prompts(), rollout=rollout())
