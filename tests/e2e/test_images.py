"""Whole runs on images: the same rows on any number of workers, and a policy that learns to
look.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.errors import ImageError
from siirl_dask.tasks import cells
from siirl_dask.tasks.cells import write_blanked, write_cells_task
from tests.e2e.test_turns import LOGPROBS, TURNS, check_equal, flat
from tests.images.pictures import png

IMAGES = shipped("quickstart_vlm.yaml")


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    """The task with few rows, and a model of each family that has seen ten batches of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_SIZES", {"train": 256, "validation": 16, "test": 16})
        patch.setattr(cells, "_HELD_OUT", 8)
        families = ("qwen2_5_vl", "qwen3_vl")
        folder = tmp_path_factory.mktemp("cells")
        return {
            family: write_cells_task(folder / family, family=family, accuracy=0.0)
            for family in families
        }


def of(task, *more):
    return (
        f"data.url={task.train}",
        f"model.path={task.model}",
        "rewards.function=siirl_dask.tasks.cells:counted_cells",
        "rollout.max_response_length=3",
        "data.batch_size=8",
        "trainer.warmup_steps=0",
        *more,
    )


PLACED = {
    "two": ("cluster.workers=2",),
    "two-apart": (
        "cluster.workers=2",
        "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
    ),
    "four": ("cluster.workers=4", "cluster.placement={}"),
    "four-apart": (
        "cluster.workers=4",
        "cluster.placement={rollout: [0, 1], reward: [1, 2], policy: [2, 3]}",
    ),
}
SAMPLE = {"qwen2_5_vl": ("two", "four-apart"), "qwen3_vl": ("two-apart", "four")}
"""Two placements for each family: which images a worker sees does not depend on it."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "places"),
    [
        *SAMPLE.items(),
        *(pytest.param(family, (*PLACED,), marks=pytest.mark.sweep) for family in SAMPLE),
    ],
)
def test_rows_are_the_same_on_any_workers_and_logprobs_are_the_trainers(
    train, untaught, family, places
):
    given = of(untaught[family], "run.steps=2", "trainer.lr=1e-3")
    one = train("one", *given, "cluster.workers=1", config_file=IMAGES)
    for step in (1, 2):
        rows = one.table("rollouts", step)
        sampled, trained = (flat(rows, column) for column in LOGPROBS)
        assert np.abs(sampled - trained).max() < 1e-5
        assert all("<|image_pad|>" in text for text in rows["prompt_text"].to_pylist())
        grids = {len(ids) for ids in rows["prompt_ids"].to_pylist()}
        assert len(grids) > 2, "pictures of several sizes"
    assert one.records()[0]["metrics"]["data/images"] == 8
    for name in places:
        other = train(name, *given, *PLACED[name], config_file=IMAGES)
        for step in (1, 2):
            check_equal(one, other, step)
        for expected, got in zip(one.records(), other.records(), strict=True):
            for metric in ("policy/loss", "policy/grad_norm", "reward/mean", "data/images"):
                assert got["metrics"][metric] == pytest.approx(
                    expected["metrics"][metric], abs=1e-5
                ), (name, metric)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_a_policy_learns_to_count_by_looking(train, tmp_path):
    task = write_cells_task(tmp_path / "cells", family="qwen3_vl")
    given = (
        "data.batch_size=32",
        "rollout.n=8",
        "algorithm.minibatches=4",
        "trainer.lr=4e-4",
        "run.steps=60",
    )

    def gain(name, *more):
        run = train(name, *of(task), *given, "cluster.workers=2", *more, config_file=IMAGES)
        rewards = [record["metrics"]["reward/mean"] for record in run.records()]
        return np.mean(rewards[-5:]) - np.mean(rewards[:5])

    assert gain("seen") > 0.2
    assert gain("black", f"data.url={write_blanked(task.train, tmp_path / 'black.parquet')}") < 0.15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_broken_image_ends_the_run_by_its_row_before_anything_is_generated(
    train, untaught, tmp_path
):
    rows = pq.read_table(untaught["qwen2_5_vl"].train).slice(0, 8)
    broken = rows["images"].to_pylist()
    broken[3][0]["bytes"] = png(24, 24)[:300]
    images = pa.array(broken, rows.schema.field("images").type)
    pq.write_table(
        rows.set_column(rows.column_names.index("images"), "images", images),
        tmp_path / "broken.parquet",
    )
    given = of(
        untaught["qwen2_5_vl"],
        f"data.url={tmp_path / 'broken.parquet'}",
        "run.steps=1",
        "cluster.workers=2",
    )
    with pytest.raises(
        ImageError,
        match=r"row \d of step 1 \(row 3 of part 0 of the dataset\): image 1 of 1: it is dam",
    ):
        train("broken", *given, config_file=IMAGES)
    assert not (tmp_path / "broken" / "rollouts").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reward_that_asks_for_images_gets_their_files(train, untaught, tmp_path):
    given = of(
        untaught["qwen2_5_vl"],
        "rewards.function=tests.e2e.rewards:bytes_of_images",
        "nodes.reward.with.columns=[images]",
        "run.steps=1",
        "cluster.workers=2",
        "cluster.placement={rollout: [0], reward: [1], policy: [1]}",
    )
    run = train("asks", *given, config_file=IMAGES)
    rows, stored = run.table("rollouts", 1), pq.read_table(untaught["qwen2_5_vl"].train)
    sizes = [sum(len(image["bytes"]) for image in shown) for shown in stored["images"].to_pylist()]
    assert rows["reward"].to_pylist() == [sizes[row] for row in rows["data_row"].to_pylist()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.sweep)]
)
def test_episodes_that_show_images_are_the_same_on_any_workers_and_with_vllm(
    train, untaught, family
):
    """Images of the dataset and of environments, over turns."""
    given = of(
        untaught[family],
        "images={column: images, observations: true}",
        "environments.environment=tests.e2e.worlds:Looking",
        "environments.turn_tokens=8",
        "environments.turns=4",
        "rollout.max_response_length=96",
        "data.max_prompt_length=64",
        "run.steps=2",
        "trainer.lr=1e-3",
    )
    one = train("one", *given, "cluster.workers=1", config_file=TURNS)
    apart = "cluster.placement={rollout: [0], environments: [0], policy: [1, 2]}"
    two = train(
        "two", *given, "cluster.workers=3", apart, "environments.max_open=3", config_file=TURNS
    )
    others = [two]
    if importlib.util.find_spec("vllm"):
        vllm = ("rollout.engine=vllm", "rollout.vllm.kv_cache_memory=64MiB", "cluster.workers=1")
        others.append(train("vllm", *given, *vllm, "cluster.placement={}", config_file=TURNS))
    for step in (1, 2):
        for other in others:
            rows = check_equal(one, other, step)
        mask = flat(rows, "response_mask").astype(bool)
        sampled, trained = (flat(rows, column) for column in LOGPROBS)
        assert np.abs(sampled - trained)[mask].max() < 1e-5
        seen = [len(shown) for shown in rows["observed_images"].to_pylist()]
        assert {1, 2} <= {*seen}
