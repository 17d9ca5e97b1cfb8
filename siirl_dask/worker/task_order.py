"""Runs a worker's tasks of a run one after the other, in the order in which the driver submitted
them.

Dask sends a task to its worker at once, since none depends on another: between two steps no worker
waits for the scheduler. A worker of an existing cluster may have several threads, which would run
several tasks at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from siirl_dask.worker.stop import SLICE, StopFlag


class TaskOrder:
    """Admits tasks in the order of their numbers: 0, 1, 2 and so on."""

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
