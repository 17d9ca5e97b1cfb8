"""Frees what a run has built on a worker, once the run is over and none of its tasks is inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from siirl_dask.errors import RunError
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.stop import SLICE, StopFlag

LEAVE_TIMEOUT = 30.0
"""Seconds for the tasks of an earlier run to leave a worker, while they get nothing done."""


class Release:
    """Calls ``free`` once, after ``end``, in the thread that leaves last.

    A task may be in a call that never returns: then its models stay in memory as long, and nobody
    waits for them.
    """

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self._changed = threading.Condition()
        self._inside = 0
        self._over = False
        self._taken = False
        """Whether a thread frees everything, or the next run has taken it over."""
        self._freed = False

    @property
    def is_draining(self) -> bool:
        """Whether the run is over and not everything is freed yet."""
        if not self._over:
            return False
        return not self._freed

    @property
    def inside(self) -> bool:
        """Whether a task is inside."""
        return self._inside > 0

    @contextmanager
    def task(self) -> Iterator[None]:
        """Keep everything that the run has built while inside."""
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()
            self._free_if_last()

    def end(self, patience: float) -> None:
        """Free everything. Waits up to ``patience`` seconds for tasks to leave; one that leaves
        later frees it then.
        """
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._inside, patience)
        self._free_if_last()

    def if_inside(self, act: Callable[[], object]) -> None:
        """Call ``act`` if a task is inside. No task leaves meanwhile, so no other run begins in
        this process.
        """
        with self._changed:
            if self._inside:
                act()

    def hand_over(self, worker: str, stop: StopFlag, progress: TaskProgress) -> bool:
        """Wait until no task is inside, and return True: nothing is freed, everything is the
        caller's from then on. Returns False where everything was freed meanwhile.

        ``progress`` is that of these tasks. RunError, naming ``worker``, where a task does not
        leave and makes no progress.
        """
        beats = progress.beats
        deadline = time.monotonic() + LEAVE_TIMEOUT
        while True:
            with self._changed:
                if self._taken:
                    return False
                if not self._inside:
                    self._taken = True
                    self._freed = True
                    return True
                self._changed.wait(SLICE)
            stop.check()
            if progress.beats != beats:
                beats = progress.beats
                deadline = time.monotonic() + LEAVE_TIMEOUT
            if time.monotonic() > deadline:
                raise RunError(_still_inside(worker))

    def _free_if_last(self) -> None:
        with self._changed:
            if self._inside or not self._over or self._taken:
                return
            self._taken = True
        try:
            self._free()
        finally:
            self._freed = True


def await_all(earlier: list[Release], worker: str, stop: StopFlag) -> None:
    """Wait until earlier runs have freed everything, and clear ``earlier``. RunError where a
    task does not return.
    """
    deadline = time.monotonic() + LEAVE_TIMEOUT
    while any(release.is_draining for release in earlier):
        if time.monotonic() > deadline:
            raise RunError(_still_inside(worker))
        stop.wait(0.1)
    earlier.clear()


def _still_inside(worker: str) -> str:
    return (
        f"worker {worker!r} is still inside a task of an earlier run, {LEAVE_TIMEOUT:g} s after "
        "that was stopped: restart the worker"
    )
