"""Hands a run's records to a backend in a thread of its own: a backend can neither stop a run
nor slow it down.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from siirl_dask.observe.backends.protocol import TrackedRun, TrackerBackend
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status

_MOST = 10_000  # calls that wait; about 20 MB of records
_LEAST_PATIENCE = 30.0  # seconds that a backend has at the end to send what waits


class Outlet:
    """Calls one backend in order. What it raises is said once, and it gets nothing more; so does
    one that lags far.

    The thread is a daemon: one that never comes back ends with the process.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], TrackerBackend],
        note: Callable[[str], None],
        most: int = _MOST,
    ) -> None:
        """``make`` is called in the thread: to import a backend takes seconds. ``note`` prints a
        sentence.
        """
        self.name = name
        self._make = make
        self._note = note
        self._calls: queue.Queue[Callable[[TrackerBackend], None] | None] = queue.Queue(most)
        self._most = most
        self._dropped = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"siirl-{name}", daemon=True)
        self._thread.start()

    def begin(self, run: TrackedRun) -> None:
        """Have the backend open the run."""
        self._put(lambda backend: backend.begin(run))

    def rewind(self, step: int) -> None:
        """Tell the backend that the steps from ``step`` on come again."""
        self._put(lambda backend: backend.rewind(step))

    def write(self, record: Record) -> None:
        """Give the backend a record."""
        self._put(lambda backend: backend.write(record))

    def write_all(self, records: Sequence[Record]) -> None:
        """Give the backend many records: they wait as one call."""

        def write(backend: TrackerBackend) -> None:
            for record in records:
                backend.write(record)

        if records:
            self._put(write)

    def end(self, status: Status) -> None:
        """Tell the backend how the run ended, and that nothing more comes."""
        self._put(lambda backend: backend.end(status))
        self._put(None)

    def wait(self, deadline: float) -> None:
        """Wait until the backend has sent everything, up to a time of the monotonic clock; then
        leave it.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._drop(
                f"it had not sent everything when the run ended ({self._calls.qsize()} calls were "
                "left)"
            )

    def _put(self, call: Callable[[TrackerBackend], None] | None) -> None:
        if self._dropped.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop(f"it is {self._most} calls behind")

    def _work(self) -> None:
        try:
            backend = self._make()
            while (call := self._calls.get()) is not None and not self._dropped.is_set():
                call(backend)
        except BaseException as error:  # a library may raise anything, and some exit
            self._drop(f"{type(error).__name__}: {error}"[:500])

    def _drop(self, reason: str) -> None:
        if self._dropped.is_set():
            return
        self._dropped.set()
        self._note(
            f"{self.name} gets no more metrics of this run: {reason}; metrics.jsonl has them all"
        )


def patience(slowest: float = _LEAST_PATIENCE) -> float:
    """Return the time of the monotonic clock until which a run that has ended waits for its
    backends.
    """
    return time.monotonic() + slowest
