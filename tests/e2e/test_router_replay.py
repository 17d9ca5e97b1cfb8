"""A run whose policy goes by the engine's routes, on one worker and on two."""

import json

import pytest

from siirl_dask.commands.plan import describe_run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import tiny_model
from tests.conftest import digits_overrides

EXACT = ["row_id", "prompt_ids", "response_ids", "reward", "routed_experts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), seed=1, family="qwen3_moe", tied=False)


def test_routes_are_stored_and_replayed_on_any_number_of_workers(train, folder):
    def start(name, *overrides):
        return train(name, f"model.path={folder}", "run.steps=2", *overrides)

    replay = "rollout.router_replay=true"
    one = start("one", replay, "cluster.workers=1", "cluster.placement={}")
    apart = start(
        "apart", replay, "cluster.workers=2", "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
        "trainer.gradient_checkpointing=true",
    )  # fmt: skip
    shards = start(
        "shards", replay, "cluster.workers=2", "cluster.placement={}", "trainer.backend=fsdp"
    )
    off = start("off", "cluster.workers=1", "cluster.placement={}")
    for step in (1, 2):
        rows = one.table("rollouts", step)
        for ids, prompt, routes in zip(
            *(rows[name].to_pylist() for name in ("response_ids", "prompt_ids", "routed_experts")),
            strict=True,
        ):
            assert len(routes) == 2 * 2 * (len(prompt) + len(ids) - 1)
        assert {expert for routes in rows["routed_experts"].to_pylist() for expert in routes} == {
            0,
            1,
            2,
            3,
        }
        for other in (apart, shards):
            assert other.table("rollouts", step).select(EXACT).equals(rows.select(EXACT)), step
    for other in (apart, shards):
        for expected, got in zip(one.records(), other.records(), strict=True):
            for metric in ("policy/loss", "policy/entropy", "mismatch/kl"):
                assert got["metrics"][metric] == pytest.approx(
                    expected["metrics"][metric], abs=1e-5
                ), metric

    plain, rows = off.table("rollouts", 1), one.table("rollouts", 1)
    assert "routed_experts" not in plain.column_names
    # later mini-batches go by routes of older weights
    for column in (*EXACT[:-1], "rollout_logprobs", "old_logprobs"):
        assert plain[column].equals(rows[column]), column


def test_a_plan_counts_the_bytes_of_routes_and_refuses_models_without_experts(
    digits_task, folder, tmp_path
):
    def moved(*overrides):
        given = [
            *digits_overrides(digits_task, tmp_path / "run"),
            "data.max_prompt_length=32",
            *overrides,
        ]
        file = load_config_file(shipped("quickstart"), given)
        edges = json.loads(describe_run(file.config, *dags(file), "json"))["phases"]["train"][
            "edges"
        ]
        return {(edge["source"], edge["target"]): edge for edge in edges}

    on, off = (
        moved(f"model.path={folder}", f"rollout.router_replay={replay}")
        for replay in ("true", "false")
    )
    edge = "rollout", "old_logprobs"
    assert "routed_experts" in on[edge]["columns"]
    rows, tokens = 8 * 4, 32 + 8 - 1
    assert on[edge]["bytes"] - off[edge]["bytes"] == rows * (8 + tokens * 2 * 2)
    with pytest.raises(
        ConfigError, match=r"rollout\.router_replay=true: .* is a qwen3, and routes"
    ):
        moved("rollout.router_replay=true")
