"""Which earlier turn a node that is behind its step looks at, and what nobody may have forgotten by then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.messages import Turn
from siirl_dask.planner import Behind, Chain
from siirl_dask.worker.history import History


def history(steps):
    return History({"train": [Chain("trains", ()), Chain("generates", (Behind(steps, ()),))], "validation": []})


def turns_of(settling):
    """A train turn for each item, validated after where the item is True."""
    turns = []
    for step, settles in enumerate(settling, 1):
        turns.append(Turn("train", step, len(turns), settles))
        if settles:
            turns.append(Turn("validation", step, len(turns)))
    return turns


def looked_at(steps, settling):
    """Steps that a worker looks at in each train turn."""
    worker, seen = history(steps), []
    for turn in turns_of(settling):
        worker.enter(turn, turn.sequence)
        if turn.phase == "train":
            earlier = worker.earlier(turn, steps)
            seen.append(earlier and earlier.step)
    return seen


def test_a_node_looks_as_many_steps_back_as_it_is_behind_and_at_its_own_step_where_that_settles():
    assert looked_at(1, [False] * 4) == [None, 1, 2, 3]
    assert looked_at(2, [False, False, False, True, False, False, False]) == [None, None, 1, 4, None, None, 5]


@given(
    steps=st.integers(1, 4),
    settling=st.lists(st.booleans(), min_size=1, max_size=20),
    lags=st.lists(st.integers(0, 6), min_size=60, max_size=60),
)
def test_nothing_is_forgotten_that_a_worker_still_looks_at(steps, settling, lags):
    """Whatever one worker has completed while another is anywhere after: the driver tells both what all have."""
    turns = turns_of(settling)
    for at, turn in enumerate(turns):
        if turn.phase != "train":
            continue
        looking = history(steps)
        for past in turns[: at + 1]:
            looking.enter(past, max(0, past.sequence - lags[past.sequence]))
        earlier = looking.earlier(turn, steps)
        holding = history(steps)
        for other in turns:  # as long as one worker is in `turn`, no other is told that it is completed
            kept_from = holding.enter(other, min(turn.sequence, max(0, other.sequence - lags[-1 - other.sequence])))
            assert earlier is None or kept_from <= earlier.sequence


def test_without_a_node_that_is_behind_all_that_is_completed_is_forgotten():
    worker = history(0)
    assert worker.enter(Turn("train", 9, 8), 7) == 7
