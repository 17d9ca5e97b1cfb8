"""Notices the activity of a worker's process while it runs code of libraries that reports no
progress.

A model's folder is read, kernels are compiled, graphs are captured: libraries do that for minutes
silently. The system's counts distinguish it from a process that waits for ever: seconds of its
cores, and pages that it reads.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # Dask needs it

from siirl_dask.worker.monitoring.task_progress import TaskProgress

_EVERY = 1.0  # seconds between two samples
# of one core: a worker that waits takes a twentieth, one on a crowded machine may get no more
_CORES = 0.1
_BLOCKS = 256  # read from a disk or over a network: each has 512 bytes


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts that the system keeps of this process, and of those that it has started."""

    cpu: float
    """Seconds of cores."""
    blocks: int
    """Blocks and mapped pages that were read from where files are."""

    @staticmethod
    def now() -> Counts:
        """Return the counts so far."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
        for child in psutil.Process().children(recursive=True):  # compilers
            try:
                times = child.cpu_times()
            except psutil.Error:
                continue
            cpu += times.user + times.system
        return Counts(cpu, own.ru_inblock + own.ru_majflt)

    def shows_work_since(self, earlier: Counts, seconds: float) -> bool:
        """Return whether the process has computed or read in the ``seconds`` since ``earlier``."""
        if self.cpu - earlier.cpu > _CORES * seconds:
            return True
        return self.blocks - earlier.blocks > _BLOCKS * seconds


@contextmanager
def counts_as_progress(progress: TaskProgress) -> Iterator[None]:
    """Count a beat of ``progress`` every second in which this process computes or reads, while
    inside.
    """
    stopped = threading.Event()

    def watch() -> None:
        before = Counts.now()
        while not stopped.wait(_EVERY):
            now = Counts.now()
            if now.shows_work_since(before, _EVERY):
                progress.beat()
            before = now

    thread = threading.Thread(target=watch, name="siirl-activity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
