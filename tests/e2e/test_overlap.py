"""Rewards that begin while responses are generated: the same rows and rewards, on any number of
workers.
"""

import pytest

from tests.e2e.test_invariance import EXACT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PLACEMENTS = {
    "1": (1, "{}"),
    "2": (2, "{}"),
    "2+2": (4, "{rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"),
}


def test_rewards_that_begin_early_are_the_same_to_the_bit_on_any_number_of_workers(train):
    given = ("rewards.processes=1", "rollout.max_rows=2", "run.steps=2")

    def start(placement, overlap):
        workers, placed = PLACEMENTS[placement]
        where = (f"cluster.workers={workers}", f"cluster.placement={placed}")
        return train(f"{placement}-{overlap}", *given, *where, f"run.overlap={overlap}")

    off = start("1", overlap=False)
    for placement in PLACEMENTS:
        on = start(placement, overlap=True)
        for step in (1, 2):
            expected, got = off.table("rollouts", step), on.table("rollouts", step)
            assert got.select(EXACT).equals(expected.select(EXACT)), (placement, step)
        assert all(record["metrics"]["rows/scored_early"] > 0 for record in on.records()), placement
    assert not any("rows/scored_early" in record["metrics"] for record in off.records())
