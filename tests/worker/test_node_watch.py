"""The watchdog names a worker whose node is silent, and stays quiet while every worker works,
waits or is elsewhere.
"""

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.scheduler.node_watch import NodeWatch
from siirl_dask.worker.monitoring.task_progress import Reading

NODE = "node 'reward', train step 3"
TIMEOUT = 10.0


def looks(watch, *histories):
    """Look once a second at workers 'w0', 'w1', ..., each with its readings and the times of its
    heartbeats.
    """
    for at, given_at_once in enumerate(zip(*histories, strict=True)):
        found = watch.silent_workers(
            1.0, {f"w{number}": one for number, one in enumerate(given_at_once)}
        )
        if found:
            return at, found
    return None


def working(seconds, *, place=NODE, waits=False, every=1):
    return [(Reading(at // every, place, waits), float(at)) for at in range(seconds)]


@given(
    st.lists(
        st.one_of(
            st.builds(working, st.just(60), every=st.integers(1, 9)),
            st.builds(working, st.just(60), waits=st.just(True), every=st.just(100)),
            st.builds(
                working,
                st.just(60),
                place=st.sampled_from(["", "the building of role 'x'"]),
                every=st.just(100),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_workers_that_work_wait_or_are_in_no_node_are_never_named(histories):
    assert looks(NodeWatch(TIMEOUT), *histories) is None


@given(st.integers(1, 30), st.integers(1, 9))
def test_a_node_that_gets_nothing_done_is_named_when_its_time_is_over_and_not_before(began, every):
    silent = [
        *working(began),
        *[(Reading(began, NODE, False), float(at)) for at in range(began, 60)],
    ]
    at, (found,) = looks(NodeWatch(TIMEOUT), working(60, every=every, waits=True), silent)
    assert TIMEOUT <= at - began + 1 <= TIMEOUT + 1
    assert (found.member, found.place, found.heard) == ("w1", NODE, True)
    assert found.seconds >= TIMEOUT


@given(st.booleans())
def test_a_process_without_heartbeats_comes_first_though_it_seemed_to_wait(waited):
    """One that was stopped has said last that it waited; another has been silent in its node for
    longer.
    """
    stopped = [*working(5, waits=waited), *[(Reading(4, NODE, waited), 4.0)] * 55]
    hanging = [(Reading(1, NODE, False), float(at)) for at in range(60)]
    at, found = looks(NodeWatch(TIMEOUT), hanging, stopped)
    assert at == TIMEOUT
    assert [(one.member, one.heard) for one in found] == [("w1", False), ("w0", True)]


def test_a_timeout_of_zero_sees_nothing():
    assert looks(NodeWatch(0.0), [(Reading(1, NODE, False), 0.0)] * 1000) is None
