"""Counts the bytes of rows that a worker receives, by the way they travel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from siirl_dask.planner import Hosts
from siirl_dask.planner.hosts import host_of


@dataclass(slots=True)
class Traffic:
    """Bytes of rows received from other workers since the start, by the way they travelled and by the worker."""

    worker: str
    """Worker that counts them."""
    hosts: Hosts
    messages: int = 0
    shared_memory: int = 0
    early: int = 0
    """Bytes that had arrived before their table was whole and were not fetched again."""
    by_worker: Counter[str] = field(default_factory=Counter)
    shared_by_worker: Counter[str] = field(default_factory=Counter)
    """The part of them that travelled through shared memory."""

    @property
    def total(self) -> int:
        return self.messages + self.shared_memory

    @property
    def between_hosts(self) -> int:
        """Bytes of rows received from workers of other hosts."""
        here = host_of(self.worker, self.hosts)
        return sum(count for worker, count in self.by_worker.items() if host_of(worker, self.hosts) != here)

    def add_message(self, worker: str, nbytes: int) -> None:
        self.messages += nbytes
        self.by_worker[worker] += nbytes

    def add_shared(self, worker: str, nbytes: int) -> None:
        self.shared_memory += nbytes
        self.by_worker[worker] += nbytes
        self.shared_by_worker[worker] += nbytes
