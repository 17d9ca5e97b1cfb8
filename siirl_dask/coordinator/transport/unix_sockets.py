"""Carries requests between processes of one host, over Unix sockets: a sixth of the time of a message over tcp.

What shared memory moves in a few milliseconds, the words about it must not double. Sockets have abstract names (Linux):
nothing is left in any folder when a process is killed, and only processes of the same user are answered.

A message is the length of its head (4 bytes, little-endian), the head (msgpack) and its frames. Requests and replies
carry a number, so that many can be under way on one connection and a late answer to a request that was given up finds
nobody.
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

from siirl_dask.coordinator.arena import shared_memory_domain
from siirl_dask.coordinator.frames import Frame
from siirl_dask.coordinator.limits import physical_memory
from siirl_dask.coordinator.messages import Handler, Reply, Request, read_request
from siirl_dask.errors import Aborted, PeerError, SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
_MOST_HEAD_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred (unix(7))


class LocalLinks:
    """One worker's listener, and its connections to peers of this host. {name: address} are the run's ``members``."""

    def __init__(self, run: str, worker: str, members: Mapping[str, str], handler: Handler) -> None:
        self._run = run
        self._worker = worker
        self._members = members
        self._handler = handler
        self._links: dict[str, asyncio.Task[_Link | None]] = {}
        self._served: set[_Channel] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        if shared_memory_domain():
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._accept, path=self._name(self._worker))

    async def reaches(self, worker: str) -> bool:
        return bool(shared_memory_domain()) and await self._link(worker) is not None

    async def ask(self, worker: str, request: Request) -> Reply:
        link = await self._link(worker)
        if link is None:
            raise ConnectionError("it is not on this host")
        return await link.ask(request)

    async def _link(self, worker: str) -> _Link | None:
        if worker not in self._links:
            self._links[worker] = asyncio.create_task(_connect(self._name(worker)))
        connecting = self._links[worker]
        return connecting.result() if connecting.done() else await asyncio.shield(connecting)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for served in self._served:
            served.close()
        for connecting in self._links.values():
            if connecting.done() and (link := connecting.result()) is not None:
                link.channel.close()
            connecting.cancel()

    def _name(self, worker: str) -> str:
        return "\0siirl-" + sha256(f"{self._run} {worker} {self._members[worker]}".encode()).hexdigest()

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
            head, reply = str(error), Reply()
        except Exception:
            logger.exception("a request of run %s failed", self._run)
            head, reply = "it failed on a bug: see the worker's log", Reply()
        channel.send(message.number, head, reply.frames)


class _Link:
    """A connection to one peer."""

    def __init__(self) -> None:
        self.channel = _Channel(self._hear, self._end)
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

    def _hear(self, channel: _Channel, message: _Message) -> None:
        answer = self._waiting.get(message.number)
        if answer is not None and not answer.done():
            if isinstance(message.head, dict):
                answer.set_result(Reply(message.head, message.frames))
            else:
                answer.set_exception(PeerError(str(message.head)))

    def _end(self, channel: _Channel) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"the connection was closed: {channel.lost}"))


@dataclass(frozen=True, slots=True)
class _Message:
    number: int
    head: object
    frames: Sequence[Frame]


class _Channel(asyncio.Protocol):
    """Messages over one socket: a protocol, since a stream would take twice the time for a short one.

    ``hear`` is called with each message, ``end`` once the connection is no more, for the reason in ``lost``.
    """

    def __init__(self, hear: Callable[[_Channel, _Message], None], end: Callable[[_Channel], None]) -> None:
        self.lost: Exception | None = None
        self._hear = hear
        self._end = end
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
                self._hear(self, message)
        except PeerError as error:
            self._refuse(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self.lost or error or ConnectionError("the peer has closed it")
        for task in self._tasks:
            task.cancel()
        self._end(self)

    def send(self, number: int, head: object, frames: Sequence[Frame]) -> None:
        views = [memoryview(frame).cast("B") for frame in frames]
        packed = msgpack.packb([number, head, [view.nbytes for view in views]])
        if self.lost is None and not self._transport.is_closing():
            self._transport.writelines([_LENGTH.pack(len(packed)), packed, *views])

    def keep(self, task: asyncio.Task[None]) -> None:
        """A task that ends with the connection."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.lost = self.lost or ConnectionError("the link was closed")
        self._transport.close()

    def _refuse(self, error: PeerError) -> None:
        logger.warning("closed a link: %s", error)
        self.lost = error
        self._received.clear()
        self._transport.abort()

    def _next(self) -> _Message | None:
        """The next message, once all of it is there; until then how much is needed to go on."""
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _MOST_HEAD_BYTES:
            raise PeerError(f"received the head of a message of {length} bytes: expected at most {_MOST_HEAD_BYTES}")
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
        with memoryview(self._received) as received:
            frames = [bytes(received[first:last]) for first, last in pairwise(bounds)]
        del self._received[:end]
        self._needed = _LENGTH.size
        return _Message(number, head, frames)


def _read_head(packed: bytes) -> tuple[int, object, list[int]]:
    """Number, head and sizes of frames. PeerError for what is none."""
    try:
        number, head, sizes = msgpack.unpackb(packed, strict_map_key=False)
        valid = isinstance(number, int) and all(isinstance(size, int) and size >= 0 for size in sizes)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(f"received what is no message: {error!r}") from error
    if not valid or sum(sizes) > physical_memory():
        raise PeerError(f"received frames of {str(sizes)[:80]} bytes: more than this machine's memory")
    return number, head, sizes


async def _connect(name: str) -> _Link | None:
    link = _Link()
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: link.channel, name)
    except OSError:
        return None
    return None if link.channel.lost is not None else link


def _check_user(transport: asyncio.Transport) -> None:
    """PeerError unless the process on the other side is of this user."""
    found = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    if uid != os.getuid():
        raise PeerError(f"process {pid} of user {uid} was refused")
