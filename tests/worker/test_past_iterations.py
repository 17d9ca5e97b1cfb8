"""Lagged nodes get the right earlier iteration, whose rows nobody has dropped by then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.planner import Chain, Iteration, Lagged, Phase
from siirl_dask.worker.lagged import PastIterations


def history(steps):
    return PastIterations(
        {"train": [Chain("trains", ()), Chain("generates", (Lagged(steps, ()),))], "validation": []}
    )


def iterations_of(with_drains):
    """A train iteration for each item, validated after where the item is True."""
    iterations = []
    for step, drain in enumerate(with_drains, 1):
        iterations.append(Iteration(Phase.TRAIN, step, len(iterations), drain))
        if drain:
            iterations.append(Iteration(Phase.VALIDATION, step, len(iterations)))
    return iterations


def looked_at(steps, with_drains):
    """Steps that a worker looks at in each train iteration."""
    worker, seen = history(steps), []
    for iteration in iterations_of(with_drains):
        worker.begin(iteration, iteration.sequence)
        if iteration.phase == "train":
            earlier = worker.lagged(iteration, steps)
            seen.append(earlier and earlier.step)
    return seen


def test_a_lagged_node_gets_an_earlier_step_and_its_own_at_a_drain():
    assert looked_at(1, [False] * 4) == [None, 1, 2, 3]
    assert looked_at(2, [False, False, False, True, False, False, False]) == [
        None,
        None,
        1,
        4,
        None,
        None,
        5,
    ]


@given(steps=st.integers(1, 4), with_drains=st.lists(st.booleans(), min_size=1, max_size=20))
def test_each_step_is_looked_at_or_skipped_once(steps, with_drains):
    """A drain skips steps that would have been looked at later; a stream's source waits until
    somebody takes them.
    """
    with_drains = [*with_drains, True]
    worker, seen, skipped = history(steps), [], []
    for iteration in iterations_of(with_drains):
        worker.begin(iteration, iteration.sequence)
        if iteration.phase == "train":
            skipped += [one.step for one in worker.skipped(iteration, steps)]
            seen += [one.step for one in [worker.lagged(iteration, steps)] if one is not None]
    assert sorted(seen + skipped) == list(range(1, len(with_drains) + 1))


@given(
    steps=st.integers(1, 4),
    with_drains=st.lists(st.booleans(), min_size=1, max_size=20),
    lags=st.lists(st.integers(0, 6), min_size=60, max_size=60),
)
def test_nothing_is_forgotten_that_a_worker_still_looks_at(steps, with_drains, lags):
    """Whatever one worker has completed while another is anywhere after: the driver tells both
    what all have.
    """
    iterations = iterations_of(with_drains)
    for at, iteration in enumerate(iterations):
        if iteration.phase != "train":
            continue
        looking = history(steps)
        for past in iterations[: at + 1]:
            looking.begin(past, max(0, past.sequence - lags[past.sequence]))
        earlier = looking.lagged(iteration, steps)
        holding = history(steps)
        # as long as one worker is in `iteration`, no other is told that it is completed
        for other in iterations:
            kept_from = holding.begin(
                other, min(iteration.sequence, max(0, other.sequence - lags[-1 - other.sequence]))
            )
            assert earlier is None or kept_from <= earlier.sequence
            assert all(kept_from <= one.sequence for one in looking.skipped(iteration, steps))


def test_without_lagged_nodes_completed_iterations_are_forgotten():
    worker = history(0)
    assert worker.begin(Iteration(Phase.TRAIN, 9, 8), 7) == 7
