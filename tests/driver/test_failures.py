"""A run's failure is the one that caused the others."""

import queue

import pytest

from siirl_dask.driver.failures import failure_of
from siirl_dask.errors import (
    Aborted,
    DataError,
    NodeError,
    PeerError,
    RewardError,
    TrainingError,
    WorkerLost,
)

LOST = {"kind": "lost", "member": "1", "address": "tcp://1", "in_order": False, "silence": 0.1}


def error(raised):
    return {"kind": "error", "member": "0", "error": raised}


class Arrived:
    """Failures that have arrived, and whether more were waited for once all of them were read."""

    def __init__(self, *events):
        self._events = [*events]
        self.waited = False

    def get(self, timeout):
        if self._events:
            return self._events.pop(0)
        self.waited = True
        raise queue.Empty


@pytest.mark.parametrize("kind", [RewardError, DataError, TrainingError])
def test_a_mistake_in_the_input_ends_a_run_without_a_wait_for_other_causes(kind):
    """Two seconds went by at the end of each such run."""
    events = Arrived()
    assert isinstance(failure_of(error(kind("row 3")), events, "train step 1"), kind)
    assert not events.waited


def test_it_is_found_behind_the_failures_of_peers_that_came_first():
    events = Arrived(error(Aborted("told to stop")), error(RewardError("row 3")))
    failure = failure_of(error(PeerError("worker '1' is gone")), events, "train step 1")
    assert isinstance(failure, RewardError)
    assert not events.waited


@pytest.mark.parametrize("kind", [NodeError, PeerError])
def test_a_death_that_is_heard_of_later_caused_what_a_node_or_a_peer_said_before(kind):
    failure = failure_of(error(kind("connection reset")), Arrived(LOST), "train step 1")
    assert isinstance(failure, WorkerLost)
    assert failure.origin.worker == "1"


def test_of_errors_alone_the_first_that_is_no_peers_is_the_cause():
    events = Arrived(error(NodeError("node 'a'")), error(NodeError("node 'b'")))
    failure = failure_of(error(PeerError("worker '1' is gone")), events, "train step 1")
    assert str(failure) == "node 'a'"
    assert events.waited
