"""The bounds on what moving rows may take: bytes of memory, bytes under way at once, and threads
that copy.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from siirl_dask.planner import Hosts, host_of

MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLimits:
    """Bytes that a databuffer may use. ValueError for a message size beyond
    ``MAX_MESSAGE_BYTES``.
    """

    memory: int = 2 * 2**30
    """Budget beyond a worker's own part of an edge and its result. A quarter is for tables that
    wait to be pulled, before they spill; an eighth each for messages being received and being
    served; half for memory held for reuse, of which an eighth of all is for rows that travel early,
    where the plan has such.
    """
    message: int = 16 * 2**20
    """Bytes of rows in one message."""
    inline_lengths: int = 2**20
    """Row lengths of an edge up to this size travel with its statistics; larger ones are asked
    for."""
    early_message: int = 2**16
    """Bytes of finished rows that are worth a message while their source still makes others."""
    share_from: int = 2**12
    """Mean bytes of a row in a column from which replicated rows are shared in memory instead of
    copied."""
    spill_folder: str | None = None
    """Folder that tables spill to; None is the system's folder for temporary files."""

    def __post_init__(self) -> None:
        if not 0 < self.message <= MAX_MESSAGE_BYTES:
            raise ValueError(f"message={self.message}: expected 1 to {MAX_MESSAGE_BYTES} bytes")


class Allowance:
    """Memory that work may do without: it is granted or refused at once. Belongs to one event
    loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Count ``size`` bytes more if they fit, and return whether they do."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Return ``size`` bytes that were counted."""
        self.used -= size


class Budget:
    """Admits work, first come first served, while its bytes fit into a limit.

    Work larger than the whole limit is admitted when nothing else is under way: otherwise it would
    wait for ever. It belongs to one event loop and is called from no other thread.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        await self.acquire(size)
        try:
            yield
        finally:
            self.release(size)

    async def acquire(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self.used += size
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                # admitted and cancelled in the same pass of the loop: its bytes count already
                self.release(size)
            else:
                with suppress(ValueError):  # _admit may have dropped the cancelled entry first
                    self._waiting.remove((size, admitted))
                self._admit()  # those behind it may fit now
            raise

    def release(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        if self.used == 0:
            return True
        return self.used + size <= self.limit

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, admitted = self._waiting.popleft()
            if admitted.cancelled():
                continue
            self.used += size  # here and not where the waiter resumes: the next in line must see it
            admitted.set_result(None)


_P = ParamSpec("_P")
_T = TypeVar("_T")
# copied in about a millisecond, of which waking a thread would take a good part
_INLINE_BYTES = 2**23
_MAX_THREADS = 4  # a few saturate the memory's bandwidth


class CopyThreads:
    """A few threads for large copies, so that the event loop goes on answering peers meanwhile.

    Half of the cores at most: each copy keeps a core busy, and the other workers of the host copy
    as well.
    """

    def __init__(self) -> None:
        threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="siirl-copy")

    async def run(
        self, nbytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return the result of ``work``, which copies about ``nbytes``. Few bytes are copied at
        once, on the loop.
        """
        if nbytes <= _INLINE_BYTES:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


# Counts the bytes of rows that a worker receives, by the way they travel.


@dataclass(slots=True)
class Traffic:
    """Bytes of rows received from other workers since the start, by the way they travelled and
    by the worker.
    """

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
        total = 0
        for worker, nbytes in self.by_worker.items():
            if host_of(worker, self.hosts) != here:
                total += nbytes
        return total

    def snapshot(self) -> Traffic:
        """Return a copy, which counts no further."""
        return replace(
            self,
            by_worker=self.by_worker.copy(),
            shared_by_worker=self.shared_by_worker.copy(),
        )

    def since(self, earlier: Traffic) -> Traffic:
        """Return what has been received since a snapshot. Any thread may call it."""
        now = self.snapshot()
        return Traffic(
            worker=self.worker,
            hosts=self.hosts,
            messages=now.messages - earlier.messages,
            shared_memory=now.shared_memory - earlier.shared_memory,
            early=now.early - earlier.early,
            by_worker=now.by_worker - earlier.by_worker,
            shared_by_worker=now.shared_by_worker - earlier.shared_by_worker,
        )

    def add_message(self, worker: str, nbytes: int) -> None:
        self.messages += nbytes
        self.by_worker[worker] += nbytes

    def add_shared(self, worker: str, nbytes: int) -> None:
        self.shared_memory += nbytes
        self.by_worker[worker] += nbytes
        self.shared_by_worker[worker] += nbytes
