"""Carries requests between processes of one host, over Unix sockets: a sixth of the time of a message over tcp.

Shared memory moves rows in a few milliseconds; the messages about them must not take as long again. Sockets have
abstract names (Linux): a process that is killed leaves nothing in any folder, and only processes of the same user are
answered.

A message is the length of its head (4 bytes, little-endian), the head (msgpack) and its frames. Requests and replies
carry a number, so many can be under way on one connection, and a late answer to a request that was given up finds
nobody who waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, count, pairwise
from typing import Any

import msgpack

from siirl_dask.coordinator.host import physical_memory, shared_memory_domain
from siirl_dask.coordinator.transport.frames import Frame
from siirl_dask.coordinator.transport.messages import Handler, Reply, Request, read_request
from siirl_dask.errors import Aborted, PeerError, SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
_MAX_HEAD_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred (unix(7))


def socket_name(run: str, worker: str, address: str) -> str:
    """Return the abstract name of a worker's socket. The address tells a worker from its successor of the same name."""
    return "\0siirl-" + sha256(f"{run} {worker} {address}".encode()).hexdigest()


class UnixSockets:
    """Carries requests to the members of a run on this host, and answers theirs. Belongs to the event loop.

    ``members`` is {name: address}. ``reaches`` is False for members on other hosts: no such socket is there.
    """

    def __init__(self, run: str, worker: str, members: Mapping[str, str], handler: Handler) -> None:
        self._run = run
        self._worker = worker
        self._members = members
        self._handler = handler
        self._connections: dict[str, asyncio.Task[_Connection | None]] = {}
        self._served: set[_Channel] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        if shared_memory_domain():
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._accept, path=self._name(self._worker))

    async def reaches(self, worker: str) -> bool:
        return bool(shared_memory_domain()) and await self._connection(worker) is not None

    async def ask(self, worker: str, request: Request) -> Reply:
        connection = await self._connection(worker)
        if connection is None:
            raise ConnectionError("it is not on this host")
        return await connection.ask(request)

    async def _connection(self, worker: str) -> _Connection | None:
        """Return the one connection to a peer, made at the first request; None when the peer is not on this host."""
        if worker not in self._connections:
            self._connections[worker] = asyncio.create_task(_connect(self._name(worker)))
        connecting = self._connections[worker]
        return connecting.result() if connecting.done() else await asyncio.shield(connecting)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for served in self._served:
            served.close()
        for connecting in self._connections.values():
            if connecting.done() and (connection := connecting.result()) is not None:
                connection.channel.close()
            connecting.cancel()

    def _name(self, worker: str) -> str:
        return socket_name(self._run, worker, self._members[worker])

    def _accept(self) -> _Channel:
        channel = _Channel(self._serve, self._served.discard)
        self._served.add(channel)
        return channel

    def _serve(self, channel: _Channel, message: _Message) -> None:
        channel.keep(asyncio.create_task(self._answer(channel, message)))

    async def _answer(self, channel: _Channel, message: _Message) -> None:
        try:
            reply = await self._handler(read_request(self._run, message.head))
            head: Any = reply.header
        except Aborted:
            channel.close()  # the peer is being aborted as well
            return
        except SiirlError as error:
            head, reply = str(error), Reply()  # a head of text is a refusal
        except Exception:
            logger.exception("a request of run %s failed", self._run)
            head, reply = "it failed on a bug: see the worker's log", Reply()
        channel.send(message.number, head, reply.frames)


class _Connection:
    """The asking side of a connection to one peer."""

    def __init__(self) -> None:
        self.channel = _Channel(self._on_message, self._on_close)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    async def ask(self, request: Request) -> Reply:
        if self.channel.lost is not None:
            raise ConnectionError(str(self.channel.lost))
        number = next(self._numbers)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.channel.send(number, request.pack(), ())
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _on_message(self, channel: _Channel, message: _Message) -> None:
        answer = self._waiting.get(message.number)
        if answer is not None and not answer.done():
            if isinstance(message.head, dict):
                answer.set_result(Reply(message.head, message.frames))
            else:
                answer.set_exception(PeerError(str(message.head)))

    def _on_close(self, channel: _Channel) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"the connection was closed: {channel.lost}"))


@dataclass(frozen=True, slots=True)
class _Message:
    number: int
    head: object
    frames: Sequence[Frame]


class _Channel(asyncio.Protocol):
    """Sends and receives messages over one socket. A protocol: a stream would take twice the time for a short message.

    ``on_message`` is called with each message, ``on_close`` once the connection is closed, for the reason in ``lost``.
    """

    def __init__(self, on_message: Callable[[_Channel, _Message], None], on_close: Callable[[_Channel], None]) -> None:
        self.lost: Exception | None = None
        self._on_message = on_message
        self._on_close = on_close
        self._received = bytearray()
        self._needed = _LENGTH.size
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            _check_user(transport)
        except PeerError as error:
            self._refuse(error)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while len(self._received) >= self._needed and (message := self._next()) is not None:
                self._on_message(self, message)
        except PeerError as error:
            self._refuse(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self.lost or error or ConnectionError("the peer has closed it")
        for task in self._tasks:
            task.cancel()
        self._on_close(self)

    def send(self, number: int, head: object, frames: Sequence[Frame]) -> None:
        views = [memoryview(frame).cast("B") for frame in frames]
        packed = msgpack.packb([number, head, [view.nbytes for view in views]])
        if self.lost is None and not self._transport.is_closing():
            self._transport.writelines([_LENGTH.pack(len(packed)), packed, *views])

    def keep(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task until it is done, and cancel it when the connection is lost."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.lost = self.lost or ConnectionError("the connection was closed from this side")
        self._transport.close()

    def _refuse(self, error: PeerError) -> None:
        logger.warning("closed a connection: %s", error)
        self.lost = error
        self._received.clear()
        self._transport.abort()

    def _next(self) -> _Message | None:
        """Return the next message once all of it is there; until then, note how many bytes are needed to go on."""
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _MAX_HEAD_BYTES:
            raise PeerError(f"received the head of a message of {length} bytes: expected at most {_MAX_HEAD_BYTES}")
        start = _LENGTH.size + length
        if len(self._received) < start:
            self._needed = start
            return None
        number, head, sizes = _read_head(bytes(self._received[_LENGTH.size : start]))
        end = start + sum(sizes)
        if len(self._received) < end:
            self._needed = end
            return None
        bounds = list(accumulate(sizes, initial=start))
        with memoryview(self._received) as received:  # released below: a bytearray with a view cannot shrink
            frames = [bytes(received[first:last]) for first, last in pairwise(bounds)]
        del self._received[:end]
        self._needed = _LENGTH.size
        return _Message(number, head, frames)


def _read_head(packed: bytes) -> tuple[int, object, list[int]]:
    """Return the number, the head and the sizes of the frames. PeerError when ``packed`` is no head of a message."""
    try:
        number, head, sizes = msgpack.unpackb(packed, strict_map_key=False)
        valid = isinstance(number, int) and all(isinstance(size, int) and size >= 0 for size in sizes)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(f"received bytes that are no message: {error!r}") from error
    if not valid or sum(sizes) > physical_memory():
        raise PeerError(f"received frames of {str(sizes)[:80]} bytes: more than this machine's memory")
    return number, head, sizes


async def _connect(name: str) -> _Connection | None:
    connection = _Connection()
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: connection.channel, name)
    except OSError:
        return None
    return None if connection.channel.lost is not None else connection


def _check_user(transport: asyncio.Transport) -> None:
    """Raise PeerError unless the process on the other side is of this user."""
    credentials = transport.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise PeerError(f"process {pid} of user {uid} was refused")
