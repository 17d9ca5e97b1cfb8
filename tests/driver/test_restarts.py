"""Which failures a run is tried again after, how often, and what it ends with."""

import pytest

from siirl_dask.driver.clusters.processes import keep_ranks
from siirl_dask.driver.failures import may_pass
from siirl_dask.driver.recovery.restarts import Restarts
from siirl_dask.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    Interrupted,
    NodeError,
    PeerError,
    RewardError,
    RunError,
    SilentPeer,
    TrainingError,
    WorkerLost,
)


@pytest.fixture
def restarts():
    return Restarts(2, note=lambda text: None, announce=lambda error: None)


@pytest.mark.parametrize("failure", [WorkerLost("x"), PeerError("x"), SilentPeer("x")])
def test_a_lost_worker_or_peer_may_pass(failure):
    assert may_pass(failure)


@pytest.mark.parametrize(
    "kind",
    [
        ConfigError,
        RewardError,
        NodeError,
        TrainingError,
        Fenced,
        Interrupted,
        CheckpointError,
        RunError,
        OSError,
    ],
)
def test_what_would_fail_again_or_is_nobodys_to_try_again_is_not_tried_again(restarts, kind):
    assert not may_pass(kind("x"))


def test_a_crash_loop_ends_with_its_first_cause_and_says_how_often_it_was_tried(restarts):
    failures = [WorkerLost(f"number {number}") for number in range(3)]
    assert [restarts.after(failure, 5) for failure in failures] == [True, True, False]
    cause = restarts.cause(failures[2])
    assert cause is failures[0]
    assert cause.__notes__ == [
        "it was tried 2 times more without a new step (run.max_restarts=2); the last time: number 2"
    ]


def test_steps_that_are_done_again_are_no_new_ones(restarts):
    """A run that dies in step 6 each time, and begins again at step 1."""
    assert restarts.after(WorkerLost("first"), 5)
    restarts.resumed(0, 2, 1)
    assert restarts.after(WorkerLost("second"), 5)
    restarts.resumed(0, 2, 1)
    assert not restarts.after(WorkerLost("third"), 5)


def test_each_new_step_gives_all_restarts_back(restarts):
    for step in range(10):
        assert restarts.after(WorkerLost(f"in step {step}"), step)
        restarts.resumed(step, 2, 1)
    assert [restart.steps for restart in restarts.done] == list(range(10))


def test_a_failure_is_counted_once_however_often_it_is_asked_about(restarts):
    failure = WorkerLost("x")
    assert all(restarts.after(failure, 0) for _ in range(9))


def test_a_node_that_raises_after_a_restart_is_the_cause_itself(restarts):
    restarts.after(WorkerLost("x"), 3)
    restarts.resumed(2, 2, 1)
    failure = NodeError("node 'reward'")
    assert not restarts.after(failure, 3)
    assert restarts.cause(failure) is failure


def test_a_try_for_which_too_few_workers_came_ends_with_what_it_was_tried_after(restarts):
    lost = WorkerLost("worker '1' left the cluster")
    restarts.after(lost, 3)
    failure = RunError("1 of 2 workers came up")
    assert not restarts.after(failure, 3)
    assert restarts.cause(failure) is lost
    assert "1 of 2 workers came up" in lost.__notes__[0]


def test_without_restarts_the_first_failure_ends_the_run_as_it_is():
    announced = []
    restarts = Restarts(0, note=lambda text: None, announce=announced.append)
    failure = WorkerLost("x")
    assert not restarts.after(failure, 3)
    assert announced == [failure] == [restarts.cause(failure)]
    assert not hasattr(failure, "__notes__")


def test_a_restart_tells_what_it_cost(restarts):
    failure = WorkerLost("x")
    failure.silence = 0.5
    restarts.after(failure, 7)
    restarts.resumed(4, 2, 1)
    (done,) = restarts.done
    assert (done.cause, done.steps, done.silence, done.steps_again) == ("x", 7, 0.5, 3)
    assert 0 <= done.seconds < 5


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ("abc", "abc"),
        ("acd", "adc"),  # b is gone, d takes its rank
        ("bcde", "dbce"),
        ("bc", "bc"),
    ],
)
def test_workers_that_are_left_keep_their_ranks(there, expected):
    assert keep_ranks(list(there), "abc") == list(expected)
