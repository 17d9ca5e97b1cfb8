"""Counts the bytes of rows that come to a worker, by the way they come."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from siirl_dask.planner import Hosts
from siirl_dask.planner.hosts import host_of


@dataclass(slots=True)
class Traffic:
    """Bytes of rows that came from other workers since the start, by the way they came and by the worker."""

    worker: str
    """Worker that counts them."""
    hosts: Hosts
    messages: int = 0
    shared_memory: int = 0
    early: int = 0
    """Bytes that had come before their table was whole and were not fetched again."""
    by_worker: Counter[str] = field(default_factory=Counter)
    shared_by_worker: Counter[str] = field(default_factory=Counter)
    """The part of them that came through shared memory."""

    @property
    def total(self) -> int:
        return self.messages + self.shared_memory

    @property
    def between_hosts(self) -> int:
        """Bytes of rows that came from workers of other hosts."""
        here = host_of(self.worker, self.hosts)
        return sum(count for worker, count in self.by_worker.items() if host_of(worker, self.hosts) != here)

    def add_message(self, worker: str, nbytes: int) -> None:
        self.messages += nbytes
        self.by_worker[worker] += nbytes

    def add_shared(self, worker: str, nbytes: int) -> None:
        self.shared_memory += nbytes
        self.by_worker[worker] += nbytes
        self.shared_by_worker[worker] += nbytes
