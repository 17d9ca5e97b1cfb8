"""A byte stream over a non-blocking socket: it gathers what it sends, and receives into memory that
the caller names.

Neither side copies a large buffer: slices go to ``sendmsg`` and places to ``recvmsg_into``, 1,024
of them a call.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import asdict
from itertools import islice
from typing import Any

from siirl_dask.comms.sockets import peer_process

_MOST_VIEWS = 1024  # of a call: UIO_MAXIOV of Linux
_BUFFER = 2**13  # bytes that are received before anybody reads: heads, and short messages
_TURN = 2**22  # bytes that one connection may move before others have their turn
_LARGEST_PIECE = 2**30  # bytes: TLS receives no 2 GiB at once
_LOW_WATER = 2**18  # bytes of a long message that are worth a wake-up
_RETRY = 0.001  # seconds until a call of TLS is repeated that waits for the other direction
_WOULD_BLOCK = (BlockingIOError, InterruptedError)


class CommStream(ABC):
    """A connection as a comm needs it: over sockets it is a ``ByteStream``. One read and one write
    at a time.

    A read or a write that is cancelled closes the stream, so nothing is received into memory, or
    sent from it, that its owner takes for free. All methods raise ConnectionError once the stream
    is closed.
    """

    is_tls = False

    def __init__(self) -> None:
        self.error: Exception | None = None
        """Why the stream is closed; None while it is open."""
        self._ended = False
        """Whether the peer has sent its last byte."""
        self._on_end: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        """True as well when the peer has closed it."""
        if self.error is not None:
            return True
        return self._ended

    @abstractmethod
    async def write(self, views: Sequence[memoryview]) -> None:
        """Send the bytes of ``views``; return when their memory may change."""

    @abstractmethod
    async def read(self, size: int) -> bytes | bytearray:
        """Return the next ``size`` bytes."""

    @abstractmethod
    async def read_into(self, places: Sequence[memoryview]) -> None:
        """Fill the places with the next bytes, in their order."""

    def notify_at_end(self, on_end: Callable[[], None] | None) -> None:
        """Call ``on_end`` once, when the peer has sent its last byte or the stream is closed, or
        at once where that has happened; None: call nothing any more.
        """
        self._on_end = on_end
        if self._ended or self.error is not None:
            self._notify_end()

    def peer_info(self) -> dict[str, Any]:
        """Return what the connection says of its peer: nothing, unless it is overridden."""
        return {}

    def close(self, error: Exception | None = None) -> None:
        """Close the connection at once. A read or a write that is pending raises
        ConnectionError.
        """
        if self.error is not None:
            return
        self.error = error
        if error is None:
            self.error = ConnectionError("it was closed from this side")
        self._close()
        self._notify_end()

    @abstractmethod
    def _close(self) -> None:
        """Close the connection, whose ``error`` says why, and end what is pending."""

    def _notify_end(self) -> None:
        on_end = self._on_end
        self._on_end = None
        if on_end is not None:
            on_end()

    def _check_open(self) -> None:
        if self.error is not None:
            raise ConnectionError(str(self.error))


class _Waiter(asyncio.Future[None]):
    """A future whose task goes on within ``resume``, a callback of the loop: ``set_result`` would
    cost the loop another turn, of some 4 microseconds.
    """

    _wake_up: Callable[[Any], object] | None = None
    _context: Context | None = None

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        self._wake_up = fn
        self._context = context
        super().add_done_callback(fn, context=context)

    def resume(self) -> None:
        """End the wait. It must not be called by a task: no task can go on inside another."""
        if self.done():
            return
        wake_up = self._wake_up
        context = self._context
        if wake_up is None or context is None:
            self.set_result(None)
            return
        self.remove_done_callback(wake_up)
        self.set_result(None)
        context.run(wake_up, self)


class ByteStream(CommStream):
    """Reads and writes one socket on the running event loop.

    While no read is pending, and as long as the peer sends no more than the buffer holds, its end
    is noticed.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        sock.setblocking(False)
        self.socket = sock
        self._loop = asyncio.get_running_loop()
        self._descriptor = sock.fileno()
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        self._has_low_water = not self.is_tls
        if sock.family == socket.AF_UNIX:
            self._has_low_water = False
        self._low_water = 1
        self._buffer = memoryview(bytearray(_BUFFER))
        self._first = 0
        """Index of the first byte in the buffer that nobody has read."""
        self._end = 0
        """Index after the last byte in the buffer."""
        self._places: deque[memoryview] = deque()
        self._missing = 0
        """Bytes that the pending read still needs; 0 or less where none is pending."""
        self._reads_ahead = False
        """Whether the pending read is into the buffer, and may receive more than it needs."""
        self._read: _Waiter | None = None
        self._watched = False
        self._unsent: deque[memoryview] = deque()
        self._written: asyncio.Future[None] | None = None
        self._watch()

    @property
    def closed(self) -> bool:
        """True as well when the peer has closed it, and what it sent has been read."""
        if self.error is not None:
            return True
        if not self._ended:
            return False
        return self._first == self._end

    async def write(self, views: Sequence[memoryview]) -> None:
        """Send the bytes of ``views``; return when the last one is with the kernel."""
        self._check_open()
        assert self._written is None, "one write at a time"
        self._unsent.extend(view for view in views if view.nbytes)
        self._send()
        self._check_open()
        if not self._unsent:
            return
        self._written = self._loop.create_future()
        self._loop.add_writer(self._descriptor, self._send)
        try:
            await self._written
        except asyncio.CancelledError:
            self.close(ConnectionError("a write was cancelled"))
            raise
        finally:
            self._written = None

    async def read(self, size: int) -> bytes | bytearray:
        """Return the next ``size`` bytes."""
        if size > _BUFFER:
            data = bytearray(size)
            await self.read_into([memoryview(data)])
            return data
        if self._end - self._first < size:
            self._make_room()
            self._places = deque([self._buffer[self._end :]])
            self._reads_ahead = True
            await self._fill(size - self._end)
        first = self._first
        self._first += size
        if not self._watched:
            self._watch()
        return bytes(self._buffer[first : self._first])

    async def read_into(self, places: Sequence[memoryview]) -> None:
        """Fill the places with the next bytes, in their order."""
        remaining = deque(place for place in places if place.nbytes)
        while remaining and self._first < self._end:
            place = remaining[0]
            count = min(self._end - self._first, place.nbytes)
            place[:count] = self._buffer[self._first : self._first + count]
            self._first += count
            _advance(remaining, count)
        if remaining:
            self._places = remaining
            self._reads_ahead = False
            await self._fill(sum(place.nbytes for place in remaining))
        self._watch()

    def peer_info(self) -> dict[str, Any]:
        """Return the peer's process over a Unix socket, its certificate and the cipher over TLS."""
        if isinstance(self.socket, ssl.SSLSocket):
            return {"peercert": self.socket.getpeercert(), "cipher": self.socket.cipher()}
        if self.socket.family == socket.AF_UNIX:
            return asdict(peer_process(self.socket))
        return {}

    def _close(self) -> None:
        self._unwatch()
        self._loop.remove_writer(self._descriptor)
        with suppress(OSError):
            self.socket.close()
        self._unsent.clear()
        self._places.clear()
        self._missing = 0
        for pending in (self._read, self._written):
            if pending is not None and not pending.done():
                pending.set_exception(ConnectionError(str(self.error)))

    async def _fill(self, missing: int) -> None:
        """Receive into the places, at least ``missing`` bytes."""
        assert self._read is None, "one read at a time"
        self._check_open()
        if self._ended:
            raise ConnectionResetError("the peer has closed it")
        self._missing = missing
        if self.is_tls or not self._reads_ahead:
            # the next message of a peer that is asked in turn is not there yet: the loop says when
            self._on_readable()
            self._check_open()
            if self._missing <= 0:
                return
        self._read = _Waiter(loop=self._loop)
        self._watch()
        try:
            await self._read
        except asyncio.CancelledError:
            self.close(ConnectionError("a read was cancelled"))
            raise
        finally:
            self._read = None

    def _on_readable(self) -> None:
        if self.error is not None:
            return
        try:
            if self._missing <= 0:
                self._read_ahead()
                return
            self._receive()
        except (*_WOULD_BLOCK, ssl.SSLWantReadError):
            wanted = self._missing if self._missing > _BUFFER else 1  # few are not worth the call
            self._set_low_water(min(wanted, _LOW_WATER))
        except ssl.SSLWantWriteError:
            self._loop.call_later(_RETRY, self._on_readable)
        except OSError as error:
            self.close(error)

    def _receive(self) -> None:
        """Receive what has arrived for the pending read, as much as one turn allows."""
        received = 0
        while self._missing > 0:
            if received >= _TURN:
                self._loop.call_soon(self._on_readable)
                return
            count = self._receive_some()
            if not count:
                raise ConnectionResetError("the peer has closed it")
            received += count
            self._missing -= count
            if self._reads_ahead:
                self._end += count
            if self._missing > 0:
                _advance(self._places, count)
        self._places.clear()
        self._set_low_water(1)
        if self._read is not None:
            self._read.resume()

    def _receive_some(self) -> int:
        if self.is_tls:
            return self.socket.recv_into(self._places[0][:_LARGEST_PIECE])
        if len(self._places) == 1:
            return self.socket.recv_into(self._places[0])
        return self.socket.recvmsg_into(list(islice(self._places, _MOST_VIEWS)))[0]

    def _read_ahead(self) -> None:
        """Receive what comes while nobody reads: the next message, or the end."""
        self._make_room()
        if self._end == _BUFFER or self._ended:
            self._unwatch()
            return
        count = self.socket.recv_into(self._buffer[self._end :])
        self._end += count
        if not count:
            self._ended = True
            self._unwatch()
            self._notify_end()

    def _make_room(self) -> None:
        """Move the bytes in the buffer that nobody has read to its start."""
        if self._first == self._end:
            self._first = 0
            self._end = 0
        elif self._first:
            unread = bytes(self._buffer[self._first : self._end])
            self._buffer[: len(unread)] = unread
            self._first = 0
            self._end = len(unread)

    def _set_low_water(self, nbytes: int) -> None:
        """Let the kernel wake this process once so many bytes are there."""
        if self._has_low_water and max(1, nbytes) != self._low_water:
            self._low_water = max(1, nbytes)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._low_water)

    def _watch(self) -> None:
        if not self._watched and not self._ended and self.error is None:
            self._watched = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._descriptor)

    def _send(self) -> None:
        """Send what the kernel takes, as much as one turn allows; the loop calls it again."""
        sent = 0
        try:
            while self._unsent and sent < _TURN:
                count = self._send_some()
                sent += count
                _advance(self._unsent, count)
        except (*_WOULD_BLOCK, ssl.SSLWantWriteError):
            return
        except ssl.SSLWantReadError:
            self._loop.remove_writer(self._descriptor)
            self._loop.call_later(_RETRY, self._send_again)
            return
        except OSError as error:
            self.close(error)
            return
        if self._unsent or self._written is None:
            return
        self._loop.remove_writer(self._descriptor)
        if not self._written.done():
            self._written.set_result(None)

    def _send_some(self) -> int:
        if self.is_tls:
            # it encrypts all of what it takes at once: the kernel's buffer does not end the turn
            return self.socket.send(self._unsent[0][:_TURN])
        if len(self._unsent) == 1:
            return self.socket.send(self._unsent[0])
        return self.socket.sendmsg(list(islice(self._unsent, _MOST_VIEWS)))

    def _send_again(self) -> None:
        if self.error is None and self._written is not None:
            self._loop.add_writer(self._descriptor, self._send)
            self._send()


def _advance(views: deque[memoryview], count: int) -> None:
    """Take ``count`` bytes away from the front of ``views``."""
    while count:
        first = views[0]
        if count < first.nbytes:
            views[0] = first[count:]
            return
        count -= first.nbytes
        views.popleft()
