"""A checkpoint is whole once every worker has written its part and said what it saved."""

from itertools import permutations, product

import pytest

from siirl_dask.driver.recovery.pending_checkpoints import PendingCheckpoint
from siirl_dask.planner import Iteration, Phase

WORKERS = ("0", "1")
EVENTS = tuple(product(("saved", "written"), WORKERS))


@pytest.mark.parametrize("order", list(permutations(EVENTS)), ids=str)
def test_no_order_of_events_makes_a_checkpoint_whole_before_the_last_of_them(order):
    """A part is written in the background, and may be before its task's end is heard of: on a busy
    machine a run ended with KeyError then.
    """
    checkpoint = PendingCheckpoint(Iteration(Phase.CHECKPOINT, 10, 21), "memory://checkpoint")
    for kind, worker in order:
        assert not checkpoint.is_whole(WORKERS)
        getattr(checkpoint, kind)[worker] = {}
    assert checkpoint.is_whole(WORKERS)
