"""SIGTERM ends the iterations with a checkpoint; a second one, or the end of the grace, ends
them at once.
"""

import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.driver.recovery.preemption import Preempted, Preemption
from siirl_dask.errors import RunError
from siirl_dask.planner import Iteration, Phase

TRAIN, SAVE = Phase.TRAIN, Phase.CHECKPOINT


def plan(steps, every):
    sequence = 0
    for step in range(1, steps + 1):
        for phase in (TRAIN, SAVE) if step % every == 0 else (TRAIN,):
            yield Iteration(
                phase, step, sequence, phase is TRAIN and (step % every == 0 or step == steps)
            )
            sequence += 1


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 30))
def test_whenever_it_comes_the_last_step_has_a_checkpoint_and_is_drained(steps, every, after):
    stop = threading.Event()
    preemption = Preemption(1.0, print, stop)
    got = []
    for iteration in preemption.cut(plan(steps, every)):
        got.append(iteration)
        if len(got) > after:
            stop.set()
    assert [iteration.sequence for iteration in got] == list(range(len(got)))
    trained = [iteration for iteration in got if iteration.phase is TRAIN]
    assert [iteration.step for iteration in trained] == list(range(1, len(trained) + 1))
    if preemption.requested:
        assert got[-1].phase is SAVE or trained[-1].step == steps
        assert got[-1].step == trained[-1].step
        assert trained[-1].drain
        assert len(trained) <= after + 2


def wait_in_slices(seconds):
    """Wait as the driver does: Python runs a signal's handler between two of them."""
    for _ in range(10 * seconds):
        threading.Event().wait(0.1)


@pytest.fixture
def noted():
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield []
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_told_and_a_second_stops_at_once(noted):
    with Preemption(60.0, noted.append) as preemption:
        signal.raise_signal(signal.SIGTERM)
        assert preemption.requested
        assert noted == ["SIGTERM: what is under way and a checkpoint have 60 s (run.grace)"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_the_end_of_the_grace_stops_at_once(noted):
    began = time.monotonic()
    with Preemption(0.2, noted.append):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            wait_in_slices(10)
    assert 0.2 <= time.monotonic() - began < 9


def test_without_grace_the_first_signal_stops_at_once(noted):
    with pytest.raises(KeyboardInterrupt), Preemption(0.0, noted.append):
        signal.raise_signal(signal.SIGTERM)


def lose_a_worker(*, after_sigterm):
    if after_sigterm:
        signal.raise_signal(signal.SIGTERM)
    raise RunError("worker '3' was lost")


def test_a_failure_after_sigterm_ends_the_run_and_is_no_reason_to_try_again():
    with (
        pytest.raises(Preempted, match="what was under way failed: worker '3' was lost"),
        Preemption(60.0, print),
    ):
        lose_a_worker(after_sigterm=True)
    with pytest.raises(RunError), Preemption(60.0, print):
        lose_a_worker(after_sigterm=False)


def test_a_caller_who_wants_the_run_to_end_gets_the_failure_of_what_was_under_way():
    stop = threading.Event()
    stop.set()
    with pytest.raises(RunError), Preemption(60.0, print, stop):
        lose_a_worker(after_sigterm=False)
