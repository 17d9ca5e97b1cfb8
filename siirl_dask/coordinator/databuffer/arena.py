"""The arena: memory that rows are received into, held for reuse and open to the other processes of
this host.

Fresh memory costs more than what is done with it: the kernel clears each page when it is first
touched, which takes several times as long as copying into it. So a worker keeps its segments. A
segment is a memfd (Linux): it has no name that could outlive its processes, and a peer that has its
handle maps it and writes rows where they finally belong.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections import deque
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.errors import PeerError

Bytes = NDArray[np.uint8]

_HEADER = 4096  # bytes before the first block, which hold the segment's nonce
_ALIGNMENT = 64
_SEGMENT = 64 * 2**20
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
_NONCE = 16
_MOST_MAPPED = 256  # segments of peers


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a segment of a process. The nonce differs when a process was restarted under the
    same pid.
    """

    pid: int
    fd: int
    size: int
    nonce: bytes

    def pack(self) -> list[Any]:
        return list(astuple(self))


class SharedSegment:
    """One shared mapping, cut into blocks. Its blocks keep it alive; the kernel frees it with
    its last mapping.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.handle: Handle | None = None
        self.retired = False
        self.free: list[tuple[int, int]] = [(_HEADER, size)]
        if not shared_memory_domain():
            self.map = mmap.mmap(-1, size)
        else:
            fd = os.memfd_create("siirl_dask", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, fd)
            os.ftruncate(fd, size)
            # a peer that could shrink it would crash this process
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            self.map = mmap.mmap(fd, size)
            self.handle = Handle(os.getpid(), fd, size, secrets.token_bytes(_NONCE))
            self.map[:_NONCE] = self.handle.nonce
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)

    def discard(self) -> None:
        """Give the pages back to the system, also where a peer still has the segment mapped."""
        if self.handle is not None:
            self.map.madvise(mmap.MADV_REMOVE)

    @property
    def idle(self) -> bool:
        return self.free == [(_HEADER, self.size)]

    def allocate(self, size: int) -> int | None:
        """Return the offset of the first ``size`` free bytes, which are free no more; None where
        none fit.
        """
        for place, (start, stop) in enumerate(self.free):
            if stop - start > size:
                self.free[place] = (start + size, stop)
                return start
            if stop - start == size:
                del self.free[place]
                return start
        return None

    def release(self, offset: int, size: int) -> None:
        ranges = sorted([*self.free, (offset, offset + size)])
        self.free = [ranges[0]]
        for start, stop in ranges[1:]:
            if start == self.free[-1][1]:
                self.free[-1] = (self.free[-1][0], stop)
            else:
                self.free.append((start, stop))


class ArenaBlock:
    """A range of bytes of a segment. It returns to the arena when nothing refers to it any more."""

    __slots__ = ("__weakref__", "offset", "segment", "size")

    def __init__(self, segment: SharedSegment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size

    @property
    def bytes(self) -> Bytes:
        """View of the block, valid only while the block itself is referred to: it keeps the
        segment, not the block.
        """
        return self.segment.bytes[self.offset : self.offset + self.size]

    def buffer(self) -> pa.Buffer:
        """Return an Arrow buffer that keeps the block, as does every array and slice made over
        it.
        """
        return pa.foreign_buffer(self.segment.bytes.ctypes.data + self.offset, self.size, self)


class Arena:
    """Allocates blocks from segments, and keeps up to ``keep`` bytes of segments that nobody uses.

    Any thread may allocate and any thread may drop the last reference to a block: the lock guards
    the segments, and a block that is dropped only joins a queue, which the next call empties.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._segments: list[SharedSegment] = []
        # Appended to by finalizers, which may run under the lock: a deque needs none.
        self._returned: deque[tuple[SharedSegment, int, int]] = deque()
        self._lock = threading.Lock()

    def allocate(self, size: int) -> ArenaBlock:
        """Return ``size`` bytes, aligned to 64 and not cleared."""
        rounded = max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
        with self._lock:
            self._collect()
            segment, offset = self._find(rounded)
        block = ArenaBlock(segment, offset, size)
        weakref.finalize(block, self._returned.append, (segment, offset, rounded)).atexit = False
        return block

    @property
    def in_use(self) -> int:
        """Bytes of blocks that somebody still refers to."""
        with self._lock:
            self._collect()
            in_use = 0
            for segment in self._segments:
                free = sum(stop - start for start, stop in segment.free)
                in_use += segment.size - _HEADER - free
            return in_use

    @property
    def held(self) -> int:
        """Bytes of all segments, in use or held for reuse."""
        return sum(segment.size for segment in self._segments)

    def collect(self) -> None:
        """Take back the blocks that were dropped, and give the system the segments beyond
        ``keep``.
        """
        with self._lock:
            self._collect()

    def retire(self, segment: SharedSegment) -> None:
        """Allocate from a segment no more, because a peer may still write to the place that it was
        sent.

        A pull that failed has sent its places to sources, and a source that was slow may write
        there long after. The blocks that are in use stay valid; nothing else is allocated in the
        segment, so a late write spoils nothing.
        """
        with self._lock:
            segment.retired = True
            self._segments = [other for other in self._segments if other is not segment]

    def _find(self, size: int) -> tuple[SharedSegment, int]:
        for segment in self._segments:
            offset = segment.allocate(size)
            if offset is not None:
                return segment, offset
        pages = -(-(size + _HEADER) // mmap.PAGESIZE)
        segment = SharedSegment(max(_SEGMENT, pages * mmap.PAGESIZE))
        self._segments.append(segment)
        offset = segment.allocate(size)
        assert offset is not None
        return segment, offset

    def _collect(self) -> None:
        while self._returned:
            segment, offset, size = self._returned.popleft()
            segment.release(offset, size)
            if segment.retired and segment.idle:
                segment.discard()
        idle = 0
        for segment in [segment for segment in self._segments if segment.idle]:
            idle += segment.size
            if idle > self._keep:
                self._segments.remove(segment)
                segment.discard()


class CannotMap(PeerError):
    """A segment that this process cannot map, or that exists no more."""


class Attachments:
    """Segments of peers that this process has mapped, by nonce. Beyond ``_MOST_MAPPED``, the least
    recently used are unmapped.

    Threads that copy rows attach segments too. Two that attach the same one at once may both map
    it, which is harmless.
    """

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self._mapped: dict[bytes, Bytes] = {}
        self._lock = threading.Lock()

    def attach(self, handle: Handle) -> Bytes:
        """Return the bytes of a peer's segment. CannotMap when there is no such segment, or not
        any more.
        """
        with self._lock:
            mapped = self._mapped.pop(handle.nonce, None)
        if mapped is None:
            mapped = _map(handle, self._writable)
        with self._lock:
            self._mapped[handle.nonce] = mapped  # at the end: the dict's order is that of use
            while len(self._mapped) > _MOST_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
        return mapped

    def clear(self) -> None:
        self._mapped.clear()


def _map(handle: Handle, writable: bool) -> Bytes:
    """Map a peer's segment. The handle comes from a peer: what it names is checked before
    anything is mapped.
    """
    path = Path(f"/proc/{handle.pid}/fd/{handle.fd}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise OSError(f"{path} is no segment")
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if (
                fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _seals()
                or os.fstat(fd).st_size != handle.size
            ):
                raise OSError(f"{path} is no segment of {handle.size} bytes that cannot shrink")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapped = mmap.mmap(fd, handle.size, prot=access)
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        raise CannotMap(f"cannot map a segment of process {handle.pid}: {error}") from error
    if mapped[:_NONCE] != handle.nonce:
        raise CannotMap(
            f"refused a handle: process {handle.pid} is another one now, or has been restarted"
        )
    return np.frombuffer(mapped, np.uint8)


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def unpack_handle(value: object) -> Handle:
    """Return the handle that ``Handle.pack`` packed. PeerError when ``value`` is none."""
    match value:
        case [int(pid), int(fd), int(size), bytes(nonce)] if (
            pid > 0 and fd >= 0 and size > _HEADER and len(nonce) == _NONCE
        ):
            return Handle(pid, fd, size, nonce)
    raise PeerError(f"received {str(value)[:80]!r} for a handle of shared memory")
