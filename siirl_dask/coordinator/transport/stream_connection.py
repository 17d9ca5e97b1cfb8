"""A TCP connection that threads read and write, so that they wait in the kernel until a whole frame has passed.

An event loop wakes up for every few packets instead, and all connections of a process share its one thread.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from siirl_dask.coordinator.transport.frames import Frame
from siirl_dask.coordinator.transport.heads import LENGTH, read_head, read_length

TOKEN_BYTES = 32
_VECTORS = 512  # buffers in one call of sendmsg: the kernel takes 1,024
_LOST_AFTER = 30  # seconds in which no byte was acknowledged, as for Dask's comms
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker takes streams of rows."""

    host: str
    port: int
    token: bytes
    """The bytes that a stream begins with."""


class Connection:
    """One connection. It belongs to the event loop, and lends its socket to threads."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.lost = False
        self._loop = asyncio.get_running_loop()
        self._threads = 0  # that use the socket
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER * 1000)

    async def in_thread(self, threads: ThreadPoolExecutor, work: Callable[..., _T], *arguments: object) -> _T:
        """Return what blocking work on the socket gives. If it fails or is cancelled the connection is lost."""
        running = threads.submit(work, self.socket, *arguments)
        self._threads += 1
        running.add_done_callback(self._on_done)
        try:
            return await asyncio.wrap_future(running)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection. Threads that are inside a call on it come back, and its file is closed after that."""
        if not self.lost:
            self.lost = True
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self._close_unused()

    def _on_done(self, running: Future[_T]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody is left who could use the connection
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._threads -= 1
        self._close_unused()

    def _close_unused(self) -> None:
        if self.lost and not self._threads:  # not before: its number may be another file's a moment later
            self.socket.close()


def connect(place: Place, timeout: float) -> socket.socket:
    """Return a socket that the worker at the place will hear. OSError where nothing answers within the seconds."""
    connected = socket.create_connection((place.host, place.port), timeout)
    connected.settimeout(None)
    connected.sendall(place.token)
    return connected


def send(connected: socket.socket, buffers: Sequence[Frame]) -> None:
    """Send buffers one after the other."""
    left: list[memoryview] = [memoryview(buffer) for buffer in buffers if memoryview(buffer).nbytes]
    while left:
        sent = connected.sendmsg(left[:_VECTORS])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connected: socket.socket) -> tuple[object, list[memoryview]]:
    """Return the head and the frames of the next message. PeerError when it is none."""
    length = read_length(_fill(connected, LENGTH.size))
    _, head, sizes = read_head(_fill(connected, length))
    return head, [_fill(connected, size) for size in sizes]


def _fill(connected: socket.socket, size: int) -> memoryview:
    """Return the next bytes, in memory that may be written to. ConnectionError when the peer closes."""
    buffer = np.empty(size, np.uint8).data
    left = buffer
    while left.nbytes:
        if not (count := connected.recv_into(left, left.nbytes, socket.MSG_WAITALL)):
            raise ConnectionError("the peer has closed it")
        left = left[count:]
    return buffer
