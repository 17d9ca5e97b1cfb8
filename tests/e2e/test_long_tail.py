"""Workers that are done early take over what others have not begun: the same rows, computed elsewhere."""

from tests.e2e.test_invariance import EXACT

FOUR = ("cluster.workers=4", "cluster.placement={}", "data.batch_size=5", "algorithm.minibatches=1")
"""Five prompts for four workers: one has twice as many as the others."""


def test_rows_are_the_same_whoever_samples_them(train):
    given = (*FOUR, "rollout.max_rows=1")
    taking, keeping = (train(f"{on}", *given, f"rollout.work_stealing={on}") for on in ("true", "false"))
    for step in (1, 2, 3):
        assert taking.table("rollouts", step).select(EXACT).equals(keeping.table("rollouts", step).select(EXACT)), step
    moved, stayed = [
        sum(record["metrics"].get("rollout/taken_over", 0) for record in run.records()) for run in (taking, keeping)
    ]
    assert moved > 0
    assert stayed == 0
    taken, kept = (
        [name for step in (1, 2, 3) for name in run.table("rollouts", step)["worker"].to_pylist()]
        for run in (taking, keeping)
    )
    assert max(map(kept.count, "0123")) == 3 * 8
    assert max(map(taken.count, "0123")) < 3 * 8
