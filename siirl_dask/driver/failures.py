"""Finds the cause among the failures that workers and the supervisor report: one failure makes
others.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from traceback import format_exception
from typing import Any

from siirl_dask.errors import (
    Aborted,
    CheckpointError,
    Origin,
    PeerError,
    RunError,
    SchedulerLost,
    SiirlError,
    SilentPeer,
    TrainingError,
    UserError,
    WorkerLeft,
    WorkerLost,
    WorkersJoined,
)

FAILURES = ("error", "lost", "silent", "unsaved", "unstored")
"""Kinds of events that end a run."""
_GRACE = 2.0  # seconds after a first failure in which its cause may still arrive
# the same after a peer was silent: the cause had more time than that already
_GRACE_AFTER_SILENCE = 0.5


def failure_of(
    first: dict[str, Any], events: queue.SimpleQueue[dict[str, Any]], position: str
) -> Exception:
    """Return the failure that caused ``first`` and what follows it.

    It is a worker's death, else a worker's own error, else a peer's. ``position`` is where the run
    is, such as ``train step 3``.
    """
    failures = [first, *_following(first, events)]
    for event in failures:
        if event["kind"] == "lost":
            left = (
                f"worker {event['member']!r} at {event['address']} left the cluster during "
                f"{position}: it was "
            )
            if event["in_order"]:
                return WorkerLeft(
                    f"{left}retired or told to end; parts that were written are complete"
                )
            lost = WorkerLost(
                f"{left}killed, ran out of memory or lost its connection; parts that were written "
                f"are complete{_memory(event.get('memory'))}"
            )
            lost.silence = event["silence"]
            lost.origin = Origin(worker=event["member"], iteration=position)
            return lost
    return _cause([_as_error(event, position) for event in failures])


def may_pass(failure: BaseException) -> bool:
    """Return whether the same run may well succeed when it is launched again.

    That is so if a worker, or the connection to one, was lost, or a scheduler that another one may
    replace. What a node, a reward or the loss raises would be raised again, and an error in the
    input is the user's to correct.
    """
    if isinstance(failure, SchedulerLost):
        return failure.may_return
    return isinstance(failure, (WorkerLost, WorkersJoined, PeerError))


def _following(
    event: dict[str, Any], events: queue.SimpleQueue[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the failures that follow a first one until the cause must be among them."""
    deadline = time.monotonic() + _GRACE
    while not _has_no_other_cause(event):
        if event["kind"] == "silent" or isinstance(event.get("error"), SilentPeer):
            deadline = min(deadline, time.monotonic() + _GRACE_AFTER_SILENCE)
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        if event["kind"] in FAILURES:
            yield event


def _has_no_other_cause(event: dict[str, Any]) -> bool:
    """Return whether nothing that is still to arrive can have caused a failure: a worker's death, a
    mistake in the input, a loss that is no number. A node's error may come of a peer's death.
    """
    if event["kind"] == "lost":
        return True
    return isinstance(event.get("error"), (UserError, TrainingError))


def _as_error(event: dict[str, Any], position: str) -> Exception:
    if event["kind"] == "silent":
        silent = SilentPeer(f"{position}: {event['what']}")
        silent.silence = event["silence"]
        return silent
    if event["kind"] in ("unstored", "unsaved"):
        kind = RunError if event["kind"] == "unstored" else CheckpointError
        failure = kind(f"worker {event['member']!r}: {event['what']}")
        failure.origin = Origin(worker=event["member"], iteration=position)
        return failure
    error: Exception = event["error"]
    return error


def _memory(nbytes: object) -> str:
    """Return a clause on the last known memory of a process that is gone; empty if it is not
    known.
    """
    if not isinstance(nbytes, int) or nbytes == 0:
        return ""
    return f"; it had {nbytes / 2**30:.2f} GiB at its last heartbeat"


def _cause(errors: Sequence[Exception]) -> Exception:
    """Return the first of the errors that is most likely the cause; an error of Dask itself as a
    RunError.
    """
    cause = min(errors, key=_distance)
    if isinstance(cause, SiirlError):
        return cause
    # an error of Dask itself
    failure = RunError(f"a worker failed: {type(cause).__name__}: {cause}")
    failure.add_note("".join(format_exception(cause)))
    return failure


def _distance(error: Exception) -> int:
    """Return how far an error is from a cause: 0 for a worker's own, 1 for a peer's, 2 for that
    of an order to stop.
    """
    if isinstance(error, Aborted):
        return 2
    if isinstance(error, PeerError):
        return 1
    return 0
