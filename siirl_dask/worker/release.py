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
"""Seconds for the tasks of an earlier run to leave a worker, while they get nothing done, and then
for what they have built to be freed."""


class Release:
    """Calls ``free`` once, after ``end``, in the thread that leaves last.

    A task may be in a call that never returns: then its models stay in memory as long, and nobody
    waits for them.
    """

    def __init__(self, free: Callable[[], None], progress: TaskProgress) -> None:
        """``progress`` is that of the tasks."""
        self._free = free
        self._progress = progress
        self._changed = threading.Condition()
        self._inside = 0
        self._over = False
        self._taken = False
        """Whether a thread frees everything, or the next run has taken it over."""
        self._freed = False

    @property
    def is_draining(self) -> bool:
        """Whether not everything is freed yet of a run that is over, or has a task inside: its
        worker hears of the end a moment later than another run may come.
        """
        if self._freed:
            return False
        if self._over:
            return True
        return self.inside

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

    @property
    def progress(self) -> tuple[bool, int]:
        """Whether a task is inside, and what has got done there: a change is progress."""
        return self.inside, self._progress.beats

    def hand_over(self, worker: str, stop: StopFlag) -> bool:
        """Wait until no task is inside, and return True: nothing is freed, everything is the
        caller's from then on. Returns False where everything was freed meanwhile.

        RunError, naming ``worker``, where a task does not leave and makes no progress.
        """
        patience = _Patience([self], worker)
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
            patience.check()

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
    task does not return and makes no progress.
    """
    patience = _Patience(earlier, worker)
    while any(release.is_draining for release in earlier):
        patience.check()
        stop.wait(SLICE)
    earlier.clear()


class _Patience:
    """Ends a wait for earlier runs in which nothing gets done."""

    def __init__(self, earlier: list[Release], worker: str) -> None:
        self._earlier = earlier
        self._worker = worker
        self._seen: list[tuple[bool, int]] = []
        self._deadline = 0.0

    def check(self) -> None:
        """Raise RunError when nothing has changed for ``LEAVE_TIMEOUT`` seconds."""
        seen = [release.progress for release in self._earlier]
        if seen != self._seen:
            self._seen = seen
            self._deadline = time.monotonic() + LEAVE_TIMEOUT
        if time.monotonic() > self._deadline:
            raise RunError(
                f"worker {self._worker!r} is still inside a task of an earlier run, in which "
                f"nothing got done for {LEAVE_TIMEOUT:g} s after that was stopped: restart the "
                "worker"
            )
