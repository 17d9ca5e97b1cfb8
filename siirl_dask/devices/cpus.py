"""Reads the CPUs and NUMA nodes of a host, divides the CPUs near a card among workers, and binds a
process to some.

Linux alone binds processes; elsewhere all of this finds nothing and does nothing.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

logger = logging.getLogger("siirl_dask.worker")
SYSFS = Path("/sys")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
GIVEN = "SIIRL_GIVEN_CPUS"
"""Environment variable of a process that has bound itself: the CPUs that it had before, for
processes it starts."""
# CPUs of a worker: its task, the event loop, copies of rows, a checkpoint that is written
_LEAST = 4
_MOST = 2**13  # CPUs of a kernel, at most
_LONGEST = 2**16  # characters of a list of CPUs
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def read_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list as the kernel writes it, such as ``0-3,8``. ValueError for any
    other text.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"a list of CPUs of {len(text)} characters: expected at most {_LONGEST}")
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text[:80]!r} is no list of CPUs: expected one such as 0-3,8")
        first = int(found[1])
        last = int(found[2] or found[1])
        if not first <= last < _MOST:
            raise ValueError(
                f"{part!r} is no range of CPUs: expected numbers that rise, below {_MOST}"
            )
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def show_cpus(cpus: Collection[int]) -> str:
    """Return CPUs as the kernel lists them, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numa_nodes(root: Path = SYSFS) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node, by its number; nothing where the system tells of no
    nodes.
    """
    nodes = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        with suppress(OSError, ValueError):
            nodes[int(folder.name.removeprefix("node"))] = read_cpus(
                (folder / "cpulist").read_text()
            )
    return nodes


def kernel() -> str:
    """Return a name of the kernel under which this process runs: containers of a host have the
    same.
    """
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def given_cpus() -> frozenset[int]:
    """Return the CPUs on which this process may run, by its cgroup and its affinity; none where
    that is not known.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return frozenset(os.sched_getaffinity(os.getpid()))


def share_of(
    near: frozenset[int],
    place: int,
    count: int,
    threads: int = 1,
    root: Path = SYSFS,
) -> frozenset[int]:
    """Return the share of worker ``place`` of ``count`` in the CPUs ``near`` their cards: whole
    cores, equally many.

    Where a share would be fewer CPUs than a worker of ``threads`` threads needs, all of them have
    all.
    """
    cores = _cores(near, root)
    bounds = [index * len(cores) // count for index in range(count + 1)]
    shares = [frozenset[int]().union(*cores[first:last]) for first, last in pairwise(bounds)]
    if min(map(len, shares)) >= max(_LEAST, threads):
        return shares[place]
    return near


def count_cores(cpus: frozenset[int], root: Path = SYSFS) -> int:
    """Return how many cores the CPUs are of: two threads of one count once."""
    return len(_cores(cpus, root))


def _cores(cpus: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Return those of ``cpus`` that are threads of one core together, in the order of their
    numbers.
    """
    cores = set()
    for cpu in cpus:
        together = frozenset({cpu})
        with suppress(OSError, ValueError):
            siblings = root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            together |= read_cpus(siblings.read_text()) & cpus
        cores.add(together)
    return sorted(cores, key=min)


class CpuBinding:
    """Binds all threads of this process to CPUs, and gives them back those that they had.

    A thread that something else has bound, such as one of a library, stays where it is.
    """

    def __init__(self) -> None:
        self._before: frozenset[int] = frozenset()
        self._bound: frozenset[int] = frozenset()

    def bind(self, cpus: frozenset[int]) -> None:
        """Bind the process to those of ``cpus`` on which it may run; nothing where there are
        none, or no others.
        """
        self.undo()
        before = given_cpus()
        own = cpus & before
        if not own or own == before:
            return
        if _move(before, own):
            self._before = before
            self._bound = own
            os.environ[GIVEN] = show_cpus(before)

    def undo(self) -> None:
        """Let the process run where it could before ``bind``."""
        if self._bound:
            os.environ.pop(GIVEN, None)
            _move(self._bound, self._before)
            self._before = self._bound = frozenset()


def unbind(process: int) -> None:
    """Let a process that this one has just started run wherever this one could before it bound
    itself.

    What computes on CPUs alone, such as a reward, gains nothing by being near a card, and would
    share its few CPUs.
    """
    with suppress(OSError, ValueError):  # the process has ended, or the CPUs have gone
        given = read_cpus(os.environ.get(GIVEN, ""))
        if given:
            os.sched_setaffinity(process, given)


def _move(before: frozenset[int], after: frozenset[int]) -> bool:
    """Move the threads of this process that may run on ``before`` to ``after``; return whether
    the first one did.
    """
    try:
        os.sched_setaffinity(os.getpid(), after)
    except OSError as error:  # a container may forbid it, or have lost a CPU meanwhile
        logger.warning("this process could not be bound to CPUs %s: %s", show_cpus(after), error)
        return False
    for thread in _threads():
        with suppress(OSError):  # it has ended
            if frozenset(os.sched_getaffinity(thread)) == before:
                os.sched_setaffinity(thread, after)
    return True


def _threads() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(thread.name) for thread in Path("/proc/self/task").iterdir())
