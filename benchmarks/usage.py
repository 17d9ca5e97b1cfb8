"""Measures a set of processes: CPU seconds, and the peak of their memory while something runs.
Linux only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

_EVERY = 0.001  # seconds: a transition takes from ten milliseconds to a second
_PAGE = 4096
_PROC = Path("/proc")


def own_processes() -> list[int]:
    """This process and all that come from it."""
    this = psutil.Process()
    return [this.pid, *(child.pid for child in this.children(recursive=True))]


class CpuClock:
    """CPU seconds, user and system, that processes use from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._before = {pid: _cpu_seconds(pid) for pid in pids}

    def seconds(self) -> float:
        """Without those that have ended: they were idle."""
        after = {pid: _cpu_seconds(pid) for pid in self._before}
        return sum(seconds - self._before[pid] for pid, seconds in after.items() if seconds)


class Elsewhere:
    """Counts the cores that processes other than these keep busy from now on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._machine = _machine_seconds()
        self._own = CpuClock(own_processes())

    def cores(self) -> float:
        return (_machine_seconds() - self._machine - self._own.seconds()) / (
            time.perf_counter() - self._started
        )


def _machine_seconds() -> float:
    """CPU seconds that the machine, or the host behind it, has spent on anything."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _cpu_seconds(pid: int) -> float:
    with suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def memory_bytes(pids: Sequence[int]) -> int:
    """Anonymous memory of the processes and all shared memory of the machine, each page once.

    That is their proportional set size without mapped files. ``smaps``, which has it ready, takes
    longer to read than a transition lasts.
    """
    anonymous = sum(_field(_PROC / str(pid) / "status", "RssAnon:") for pid in pids)
    return anonymous + _field(_PROC / "meminfo", "Shmem:")


def peak_memory(pids: Sequence[int], action: Callable[[], None]) -> int:
    """The highest ``memory_bytes`` while ``action`` runs."""
    peak = memory_bytes(pids)
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, memory_bytes(pids))
            time.sleep(_EVERY)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return max(peak, memory_bytes(pids))


def warm_free_memory(nbytes: int) -> None:
    """Touch as much memory, and free it again.

    The host of a virtual machine takes back what has been free for a few seconds, and to get it
    again costs ten times an ordinary page fault: without this, a method pays for how long the
    others before it took.
    """
    memory = np.empty(nbytes, np.uint8)
    memory[::_PAGE] = 1


def _field(path: Path, name: str) -> int:
    """Bytes that a line ``name  123 kB`` of the file tells; 0 when the process is gone."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
