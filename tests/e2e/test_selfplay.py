"""Self-play: one policy is both sides of a zero-sum game, with rows of its own for each."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.tasks.nim import write_nim_task
from tests.e2e.test_turns import check_equal

SELF_PLAY = shipped("quickstart_selfplay.yaml")


@pytest.mark.slow
def test_rewards_of_both_sides_sum_to_zero_and_rows_are_the_same_on_one_worker_and_two(
    train, tmp_path
):
    task = write_nim_task(tmp_path / "nim")
    given = (
        f"data.url={task.train}",
        f"validation.url={task.validation}",
        "validation.test_url=null",
        "validation.every=3",
        f"model.path={task.model}",
        "rollout.max_response_length=64",
        "trainer.lr=1e-3",
    )
    one, two = (
        train(name, *given, f"cluster.workers={workers}", "run.steps=3", config_file=SELF_PLAY)
        for name, workers in (("one", 1), ("two", 2))
    )
    baselines = {"first": 0.0, "second": 0.0}
    for step in (1, 2, 3):
        rows = check_equal(one, two, step)
        both = rows.group_by("episode_id").aggregate(
            [("reward", "sum"), ("agent", "count_distinct")]
        )
        whole = pc.equal(both["agent_count_distinct"], 2)
        # a first move against the rules ends the others
        assert pc.mean(pc.cast(whole, "float64")).as_py() > 0.9
        assert not both.filter(whole)["reward_sum"].to_numpy().any()
        side = {name: rows.filter(pc.equal(rows["agent"], name)) for name in baselines}
        together = pc.is_in(rows["episode_id"], value_set=both.filter(whole)["episode_id"])
        means = [
            pc.mean(rows.filter(pc.and_(together, pc.equal(rows["agent"], name)))["reward"]).as_py()
            for name in side
        ]
        assert sum(means) == pytest.approx(0.0)
        for name, part in side.items():  # RAE: the reward minus what the side had before this step
            assert part["advantage"].to_numpy() == pytest.approx(
                part["reward"].to_numpy() - baselines[name], abs=1e-6
            )
            for reward in part.sort_by("row_id")["reward"].to_pylist():
                baselines[name] = 0.95 * baselines[name] + 0.05 * reward
        logged = two.records()[step - 1]["metrics"]
        assert [logged[f"baseline/{name}"] for name in baselines] == pytest.approx(
            [*baselines.values()]
        )
    played = [run.table("validation", 3) for run in (one, two)]
    assert played[0]["reward"].equals(played[1]["reward"])
    assert played[0]["agent"].equals(played[0]["answer"])  # one row a game: the policy's side
    assert {*played[0]["reward"].to_pylist()} == {0.0, 1.0}
    assert 0.1 < np.mean(played[0]["reward"].to_numpy()) < 0.6
