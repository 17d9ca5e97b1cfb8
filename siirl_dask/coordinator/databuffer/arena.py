"""Memory that rows are received into: kept, used again, and open to the other processes of this host.

Fresh memory costs more than what is done with it: the first touch of 268 MB was measured to take twelve times as long
as copying them. So a worker receives into segments that it keeps. A segment is a memfd (Linux): it has no name that
could outlive its processes, and a peer that is given its handle maps it and writes rows where they finally belong.
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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.errors import PeerError

Bytes = NDArray[np.uint8]

_HEADER = 4096  # the segment's nonce lies before its blocks
_ALIGNMENT = 64
_SEGMENT = 64 * 2**20
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
_NONCE = 16


@cache
def shared_memory_domain() -> str:
    """What two processes must have in common to map each other's segments; empty where there are no memfds."""
    if not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a segment of a process. The nonce tells a process that was restarted from the one it replaced."""

    pid: int
    fd: int
    size: int
    nonce: bytes

    def pack(self) -> list[Any]:
        return list(astuple(self))


class Segment:
    """One mapping. Blocks keep it alive; the kernel frees it when the last process lets go."""

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
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            self.map = mmap.mmap(fd, size)
            self.handle = Handle(os.getpid(), fd, size, secrets.token_bytes(_NONCE))
            self.map[:_NONCE] = self.handle.nonce
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)

    def discard(self) -> None:
        """Give the memory back, also where a peer still has it mapped."""
        if self.handle is not None:
            self.map.madvise(mmap.MADV_REMOVE)

    @property
    def idle(self) -> bool:
        return self.free == [(_HEADER, self.size)]

    def take(self, size: int) -> int | None:
        """Offset of ``size`` bytes, the first that fit."""
        for place, (start, stop) in enumerate(self.free):
            if stop - start >= size:
                self.free[place : place + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give(self, offset: int, size: int) -> None:
        ranges = sorted([*self.free, (offset, offset + size)])
        self.free = [ranges[0]]
        for start, stop in ranges[1:]:
            if start == self.free[-1][1]:
                self.free[-1] = (self.free[-1][0], stop)
            else:
                self.free.append((start, stop))


class Block:
    """A run of bytes of a segment; it goes back to the arena when nothing refers to it any more."""

    __slots__ = ("__weakref__", "offset", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size

    @property
    def bytes(self) -> Bytes:
        """Valid only while the block is."""
        return self.segment.bytes[self.offset : self.offset + self.size]

    def buffer(self) -> pa.Buffer:
        """An Arrow buffer that keeps the block."""
        return pa.foreign_buffer(self.segment.bytes.ctypes.data + self.offset, self.size, self)


class Arena:
    """Blocks from segments. At most ``keep`` bytes of segments that nobody uses are kept for later."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._segments: list[Segment] = []
        self._returned: deque[tuple[Segment, int, int]] = deque()  # a finaliser may run anywhere: it must not lock
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Block:
        """``size`` bytes, aligned to 64, not cleared."""
        rounded = max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
        with self._lock:
            self._collect()
            segment, offset = self._find(rounded)
        block = Block(segment, offset, size)
        weakref.finalize(block, self._returned.append, (segment, offset, rounded)).atexit = False
        return block

    @property
    def in_use(self) -> int:
        """Bytes of blocks that somebody holds."""
        with self._lock:
            self._collect()
            return sum(s.size - _HEADER - sum(stop - start for start, stop in s.free) for s in self._segments)

    @property
    def held(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def collect(self) -> None:
        """Take back what nobody holds any more, and give the system what is beyond the limit."""
        with self._lock:
            self._collect()

    def retire(self, segment: Segment) -> None:
        """Give out no more of a segment: a peer may still write where it was told to."""
        with self._lock:
            segment.retired = True
            self._segments = [other for other in self._segments if other is not segment]

    def _find(self, size: int) -> tuple[Segment, int]:
        for segment in self._segments:
            if (offset := segment.take(size)) is not None:
                return segment, offset
        segment = Segment(max(_SEGMENT, -(-(size + _HEADER) // mmap.PAGESIZE) * mmap.PAGESIZE))
        self._segments.append(segment)
        offset = segment.take(size)
        assert offset is not None
        return segment, offset

    def _collect(self) -> None:
        while self._returned:
            segment, offset, size = self._returned.popleft()
            segment.give(offset, size)
            if segment.retired and segment.idle:
                segment.discard()
        idle = 0
        for segment in [segment for segment in self._segments if segment.idle]:
            idle += segment.size
            if idle > self._keep:
                self._segments.remove(segment)
                segment.discard()


class CannotMap(PeerError):
    """A segment that this process cannot reach, or that is no more."""


class Attachments:
    """Segments of peers that this process has mapped, by nonce; the ones used longest ago are let go of."""

    def __init__(self, *, writable: bool, most: int = 256) -> None:
        self._writable = writable
        self._most = most
        self._mapped: dict[bytes, Bytes] = {}

    def attach(self, handle: Handle) -> Bytes:
        """The bytes of a peer's segment. CannotMap when there is no such segment, or not any more."""
        found = self._mapped.pop(handle.nonce, None)
        if found is None:
            found = _map(handle, self._writable)
        self._mapped[handle.nonce] = found
        while len(self._mapped) > self._most:
            self._mapped.pop(next(iter(self._mapped)))
        return found

    def clear(self) -> None:
        self._mapped.clear()


def _map(handle: Handle, writable: bool) -> Bytes:
    path = Path(f"/proc/{handle.pid}/fd/{handle.fd}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise OSError(f"{path} is no segment")
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _seals() or os.fstat(fd).st_size != handle.size:
                raise OSError(f"{path} is no segment of {handle.size} bytes that cannot shrink")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapped = mmap.mmap(fd, handle.size, prot=access)
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        raise CannotMap(f"cannot map a segment of process {handle.pid}: {error}") from error
    if mapped[:_NONCE] != handle.nonce:
        raise CannotMap(f"refused a handle: process {handle.pid} is another one now, or has been restarted")
    return np.frombuffer(mapped, np.uint8)


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def unpack_handle(value: object) -> Handle:
    """PeerError for what is no handle."""
    match value:
        case [int(pid), int(fd), int(size), bytes(nonce)] if pid > 0 and fd >= 0 and size > _HEADER:
            return Handle(pid, fd, size, nonce)
    raise PeerError(f"received {str(value)[:80]!r} for a handle of shared memory")
