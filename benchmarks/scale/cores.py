"""Core seconds of a process's busiest thread, and how long it was ready and no core was free, as
the kernel counts.

The other threads of a worker wake for a message and sleep again; while they wait for a core, the
thread that computes is mostly waiting for something else. Their waiting is therefore not added to
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Cores:
    """Seconds."""

    used: float = 0.0
    waited: float = 0.0

    def __sub__(self, earlier: Cores) -> Cores:
        return Cores(self.used - earlier.used, self.waited - earlier.waited)

    def __add__(self, other: Cores) -> Cores:
        return Cores(self.used + other.used, self.waited + other.waited)

    @property
    def slowdown(self) -> float:
        """Return how long a second of computing took, on average; 1 where a core was always
        free.
        """
        return 1 + self.waited / self.used if self.used else 1.0


Threads = Mapping[str, Cores]
"""Seconds since its start, by thread."""


def threads(pid: int | str = "self") -> dict[str, Cores]:
    """Return the threads of a process, and of all processes that come from it if it is given by
    its number.
    """
    pids = [pid] if isinstance(pid, str) else _tree(pid)
    found = {}
    for file in (file for each in pids for file in Path(f"/proc/{each}/task").glob("*/schedstat")):
        with suppress(OSError):  # the thread has ended
            used, waited, _ = map(int, file.read_text().split())
            found[file.parent.name] = Cores(used / 1e9, waited / 1e9)
    return found


def since(before: Threads, after: Threads) -> list[Cores]:
    """Return what each thread used since ``before``, the busiest first."""
    passed = [cores - before.get(thread, Cores()) for thread, cores in after.items()]
    return sorted(passed, key=lambda cores: -cores.used)


def total(cores: Iterable[Cores]) -> Cores:
    return sum(cores, start=Cores())


def _tree(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []
