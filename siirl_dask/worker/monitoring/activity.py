"""The activity of a worker's process where its task does not say: whether it computes or reads while
it runs code of libraries that reports no progress, and where its threads are when a node hangs.

A model's folder is read, kernels are compiled, graphs are captured: libraries do that for minutes
silently. The system's counts distinguish it from a process that waits for ever: seconds of its
cores, and pages that it reads.
"""

from __future__ import annotations

import resource
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import psutil  # type: ignore[import-untyped]  # Dask needs it

from siirl_dask.worker.monitoring.task_progress import TaskProgress

_EVERY = 1.0  # seconds between two samples
# of one core: a worker that waits takes a twentieth, one on a crowded machine may get no more
_CORES = 0.1
_BLOCKS = 256  # read from a disk or over a network: each has 512 bytes
_MAX_FRAMES = 12  # of a thread, the innermost ones
_MAX_THREADS = 3  # besides the task's own
_MAX_LINE = 160  # characters
_IDLE = (
    "threading.py",
    "selectors.py",
    "queue.py",
    "thread.py",
    "socket.py",
    "connection.py",
    "profile.py",
)


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


def stacks(first: int | None) -> list[str]:
    """Return lines with the stack of the thread ``first``, and of some others that are not idle;
    innermost last.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [
        number
        for number, frame in frames.items()
        if number not in (first, threading.get_ident())
        and not frame.f_code.co_filename.endswith(_IDLE)
    ]
    lines: list[str] = []
    for number in (first, *others[:_MAX_THREADS]):
        if number in frames:
            lines += _stack(frames[number], names.get(number, "a thread of a library"))
    return lines


def _stack(frame: FrameType, name: str) -> Iterator[str]:
    entries = traceback.extract_stack(frame)
    yield f"thread {name}"[:_MAX_LINE]
    if len(entries) > _MAX_FRAMES:
        yield f"  [... {len(entries) - _MAX_FRAMES} frames ...]"
    for entry in entries[-_MAX_FRAMES:]:
        yield f"  {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}"[:_MAX_LINE]
