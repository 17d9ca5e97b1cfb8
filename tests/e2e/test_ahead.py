"""Generation ahead of training: what sampled which rows, the same in any placement, and that it
is ahead indeed.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from siirl_dask.errors import ConfigError, TrainingError
from siirl_dask.planner import DAG, Node, columns
from tests.e2e.test_invariance import EXACT

ONE_EACH = ("cluster.workers=2", "cluster.placement={rollout: [0], reward: [0], policy: [1]}")
TWO_EACH = (
    "cluster.workers=4",
    "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}",
)


@columns()
def notice(ctx, table, *, folder: str):
    """Leave a sign that the rows of this step are there."""
    Path(folder, str(ctx.step)).touch()
    return table


@columns()
def wait_for_next(ctx, table, *, folder: str, last: int):
    """Go on only when the rows of the next step are there as well."""
    deadline = time.monotonic() + 60
    while ctx.step < last and not Path(folder, str(ctx.step + 1)).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"step {ctx.step + 1} was not generated while step {ctx.step} trained"
            )
        time.sleep(0.02)
    return table


def versions(run, steps):
    return [set(run.table("rollouts", step)["weights_version"].to_pylist()) for step in steps]


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_ahead_are_sampled_by_earlier_weights_in_any_placement(steps, train):
    given = ("run.steps=6", f"rollout.max_staleness={steps}")
    one, other = (
        train(name, *given, *where) for name, where in {"one": ONE_EACH, "two": TWO_EACH}.items()
    )
    assert versions(one, range(1, 7)) == [{max(0, step - 1 - steps)} for step in range(1, 7)]
    for step in range(1, 7):
        assert (
            other.table("rollouts", step)
            .select(EXACT)
            .equals(one.table("rollouts", step).select(EXACT))
        ), step
    for expected, got in zip(one.records(), other.records(), strict=True):
        assert got["metrics"]["policy/loss"] == pytest.approx(
            expected["metrics"]["policy/loss"], abs=1e-5
        )
        assert got["metrics"]["staleness/max"] == min(steps, got["step"] - 1)
        assert got["metrics"]["seconds/weights->load_weights"] > 0  # in parts, as without a lag


@pytest.mark.parametrize("way", ["rollout.weight_bucket=20KiB", "rollout.weight_sync=broadcast"])
def test_validation_is_of_the_newest_weights(digits_task, train, way):
    """Weights of step 1 and 3, which nobody loads before newer ones come, are taken from the
    policy that waits.
    """
    run = train(
        "validated",
        way,
        "run.steps=4",
        "rollout.max_staleness=1",
        f"validation.url={digits_task.train}",
        "validation.every=2",
        *ONE_EACH,
    )
    assert [
        set(run.table("validation", step)["weights_version"].to_pylist()) for step in (0, 2, 4)
    ] == [{0}, {2}, {4}]
    assert versions(run, range(1, 5)) == [{0}, {0}, {2}, {2}]


def test_the_next_step_is_generated_while_one_is_trained(tmp_path, train):
    folder = tmp_path / "signs"
    folder.mkdir()

    def waiting(dag: DAG) -> DAG:
        signs = Node("notice", partial(notice, folder=str(folder)), role="rollout", after="rollout")
        wait = Node(
            "wait",
            partial(wait_for_next, folder=str(folder), last=4),
            role="policy",
            after="update",
        )
        return DAG(dag.roles, (*dag.nodes[:2], signs, *dag.nodes[2:], wait))

    train("ahead", "run.steps=4", "rollout.max_staleness=1", *ONE_EACH, change=waiting)
    assert len(list(folder.iterdir())) == 4


def test_rows_of_weights_that_are_too_old_are_refused(train):
    with pytest.raises(
        TrainingError, match=r"sampled by weights 1 step behind: expected at most 0 .*max_staleness"
    ):
        train("stale", "nodes.load_weights=null", *ONE_EACH)


def test_a_dag_or_placement_that_cannot_be_ahead_is_refused(train):
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness=2.* lag=2"):
        train("apart", "rollout.max_staleness=2", "nodes.load_weights.lag=1", *ONE_EACH)
    with pytest.raises(Exception, match=r"on other workers than its own \(cluster.placement\)"):
        train("together", "rollout.max_staleness=1", "cluster.workers=2", "cluster.placement={}")


def test_long_responses_continue_in_the_next_step_and_none_is_lost(train):
    given = (
        "run.steps=5",
        "rollout.partial=true",
        "rollout.max_tokens_per_step=3",
        "rollout.max_staleness=3",
        "data.batch_size=6",
        "rollout.max_rows=2",
    )
    one, other = (
        train(name, *given, *where) for name, where in {"one": ONE_EACH, "two": TWO_EACH}.items()
    )
    found = []
    for step in range(1, 6):
        rows, same = one.table("rollouts", step), other.table("rollouts", step)
        assert rows.select(EXACT).equals(same.select(EXACT)), step
        found += rows.to_pylist()
    assert len(found) == 5 * 6 * 4
    assert {len(set(row["token_versions"])) for row in found} >= {1, 2, 3}
    for row in found:
        assert row["old_logprobs"] is not None
        assert (
            len(row["token_versions"]) == len(row["rollout_logprobs"]) == len(row["response_ids"])
        )
