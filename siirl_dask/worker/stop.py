"""A flag that stops a worker from any thread, waits in slices that notice it, and the order in which
a worker runs its tasks, which ends with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, TypeVar

from siirl_dask.errors import Aborted

_T = TypeVar("_T")
ABORT = "siirl-abort"
"""Stream operation of Dask's by which the scheduler's supervisor stops a run's workers."""
SLICE = 0.1  # seconds within which Ctrl-C and a peer's failure are noticed


class StopFlag:
    """A worker's order to stop; set once, with the reason."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._reason = ""

    def set(self, reason: str) -> None:
        """Set the flag; later reasons are ignored."""
        if not self._event.is_set():
            self._reason = reason
            self._event.set()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep. Raises Aborted as soon as the flag is set."""
        self._event.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raise Aborted, with the reason, if the flag is set."""
        if self._event.is_set():
            raise Aborted(self._reason)


def wait_for(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop, stop: StopFlag) -> _T:
    """Run ``work`` on ``loop`` from another thread and return its result. Aborted as soon as the
    flag is set.
    """
    return result_of(asyncio.run_coroutine_threadsafe(work, loop), stop)


def result_of(future: Future[_T], stop: StopFlag) -> _T:
    """Wait for ``future`` and return its result. Aborted as soon as the flag is set."""
    while True:
        try:
            return future.result(timeout=SLICE)
        except FutureTimeout:
            if future.done():  # it may have ended since, or the work itself raised TimeoutError
                return future.result()
            try:
                stop.check()
            except Aborted:
                future.cancel()
                raise
        except Exception:
            stop.check()  # a peer that was aborted first looks dead: the abort is the cause
            raise


class TaskOrder:
    """Admits tasks in the order of their numbers, 0, 1, 2 and so on, in which the driver submitted
    them.

    Dask sends a task to its worker at once, since none depends on another: between two steps no
    worker waits for the scheduler. A worker of an existing cluster may have several threads, which
    would run several tasks at the same time.
    """

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._next = 0

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Wait for the tasks before ``number``. Raises Aborted once one of them has failed or
        the run has stopped.
        """
        with self._changed:
            while number != self._next:
                self._stop.check()
                self._changed.wait(SLICE)
        self._stop.check()
        try:
            yield
        except BaseException:
            self._stop.set("a task before this one failed")
            raise
        with self._changed:
            self._next += 1
            self._changed.notify_all()
