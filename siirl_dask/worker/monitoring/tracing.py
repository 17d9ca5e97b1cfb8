"""Records what a worker does, and writes it into the run's table ``trace`` step by step, while the
run goes on.

The part of a step is written when an iteration of it ends, and again, whole, when another one of
the same step does. A store that fails, or is slow, costs parts of the trace and never the run.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from siirl_storage import stage_part

from siirl_dask.observe.trace.trace_table import trace_table
from siirl_dask.planner import TRACE, Iteration
from siirl_dask.tables import step_folder
from siirl_dask.trace import Entry, Recorder
from siirl_dask.worker.run_spec import RunSpec

# heartbeats whose median counts: a heartbeat that was delayed in one direction is wrong
_SAMPLES = 31


@cache
def clock_id() -> str:
    """Return a name of the clock that ``time.monotonic_ns`` reads: the ids of this boot and of
    its time namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/time")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:  # no Linux, or no namespaces of time
        return f"process {os.getpid()} {time.time_ns()}"


class ClockOffset:
    """Estimates nanoseconds to be added to this worker's monotonic clock for the scheduler's
    wall clock.

    Processes for which ``clock_id`` is the same read the same clock. Others are aligned by their
    offsets: Dask compares the clocks at each heartbeat, as if the answer were sent in the middle of
    the round trip.
    """

    def __init__(self) -> None:
        self._samples: deque[int] = deque([_wall()], maxlen=_SAMPLES)

    def add_sample(self, delay: float) -> None:
        """Add a measurement: the scheduler's clock is ``delay`` seconds ahead of this host's."""
        self._samples.append(_wall() + round(delay * 1e9))

    @property
    def nanoseconds(self) -> int:
        """The estimate."""
        return round(statistics.median_low(list(self._samples)))


def _wall() -> int:
    """Return the nanoseconds by which this host's wall clock is ahead of its monotonic clock."""
    return time.time_ns() - time.monotonic_ns()


logger = logging.getLogger("siirl_dask.worker")
# entries of a step, which may have a validation, a checkpoint and a test; about half a megabyte
_MAX_ENTRIES = 2**15
_LAST_SECONDS = 5.0  # for the last part, when the run is over


class Tracing:
    """Holds one worker's recorder, and writes its parts. Only the chain's thread calls it, except
    ``add_clock_sample``.

    Without ``observe.trace`` nothing is recorded and nothing written.
    """

    def __init__(self, spec: RunSpec, worker: str) -> None:
        self.recorder = Recorder(enabled=spec.trace)
        self.listener: Callable[[Sequence[Entry]], None] | None = None
        """Called with all entries as well."""
        self._spec = spec
        self._worker = worker
        self._offset = ClockOffset()
        self._step: int | None = None
        self._step_entries: list[Entry] = []
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "siirl-trace")
        self._closed = False
        self._warned = False

    def add_clock_sample(self, delay: float) -> None:
        """Add a measurement: a heartbeat has found the scheduler's clock ``delay`` seconds ahead
        of this host's.
        """
        self._offset.add_sample(delay)

    @contextmanager
    def task(self) -> Iterator[None]:
        """Record a task, and begin to write when it ends, also where it fails."""
        try:
            with self.recorder.task():
                yield
        finally:
            self._write()

    def begin(self, iteration: Iteration) -> None:
        """Record what follows under another iteration."""
        if iteration.step != self._step:
            self._step = iteration.step
            self._step_entries = []
        self.recorder.begin(str(iteration.phase), iteration.sequence)

    def finish(self) -> None:
        """Write the remaining entries, for some seconds at most."""
        self._await_part()
        self._write()
        self._await_part()

    def close(self) -> None:
        """Accept no more parts; one that is being written appears whole or not at all."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _await_part(self) -> None:
        if self._writing is not None:
            wait([self._writing], _LAST_SECONDS)

    def _write(self) -> None:
        """Begin to write the step's entries. Where the previous part is still being written,
        they go with the next.
        """
        if self._step is None or self._closed or not self.recorder.enabled:
            return
        if self._writing is not None and not self._writing.done():
            return
        drained = self.recorder.drain()
        if self.listener is not None:
            self.listener(drained)
        self._step_entries = [*self._step_entries, *drained][-_MAX_ENTRIES:]
        self._writing = self._thread.submit(self._write_part, self._step, self._step_entries)

    def _write_part(self, step: int, entries: list[Entry]) -> None:
        spec = self._spec
        assert spec.attempt is not None, "only a run with attempts has a trace"
        try:
            table = trace_table(entries, self._worker, clock_id(), self._offset.nanoseconds)
            folder = step_folder(spec.url, TRACE, step)
            index = list(spec.members).index(self._worker)
            stage_part(folder, spec.attempt, index, table, rows_per_group=_MAX_ENTRIES)
        except Exception as error:
            # each store has errors of its own; no part of a run reads the trace
            if not self._warned:
                logger.warning(
                    "the trace of step %d is not written: %s: %s", step, type(error).__name__, error
                )
            self._warned = True
