"""Carries requests between processes of one host, over Unix sockets: a sixth of the time of a
message over tcp.

Shared memory moves rows in a few milliseconds; the messages about them must not take as long again.
Sockets have abstract names (Linux): a process that is killed leaves nothing in any folder, and only
processes of the same user are answered.

The format is that of ``wire``. Requests and replies carry a number, so many can be under way on one
connection, and a late answer to a request that was abandoned finds nobody who waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import count

import psutil  # type: ignore[import-untyped]  # Dask needs it

from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport import wire
from siirl_dask.coordinator.transport.messages import Handler, Reply, Request, answer_to
from siirl_dask.coordinator.transport.wire import Frame
from siirl_dask.errors import Aborted, PeerError

logger = logging.getLogger("siirl_dask.coordinator")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred (unix(7))
_STOPPED = (
    psutil.STATUS_STOPPED,
    psutil.STATUS_TRACING_STOP,
    psutil.STATUS_ZOMBIE,
    psutil.STATUS_DEAD,
)


def socket_name(run: str, worker: str, address: str) -> str:
    """Return the abstract name of a worker's socket. A successor of that name has another: its
    address differs.
    """
    return "\0siirl-" + sha256(f"{run} {worker} {address}".encode()).hexdigest()


class UnixSockets:
    """Carries requests to the members of a run on this host, and answers theirs. Belongs to the
    event loop.

    ``members`` is {name: address}. ``reaches`` is False for members on other hosts: no such socket
    is there.
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
            self._server = await loop.create_unix_server(
                self._accept, path=self._name(self._worker)
            )

    async def reaches(self, worker: str) -> bool:
        if not shared_memory_domain():
            return False
        return await self._connection(worker) is not None

    async def ask(self, worker: str, request: Request) -> Reply:
        connection = await self._connection(worker)
        if connection is None:
            raise ConnectionError("it is not on this host")
        return await connection.ask(request)

    async def runs(self, worker: str, seconds: float) -> bool:
        """The kernel closes a process's connections as it ends, and shows one that a signal
        stopped.
        """
        connection = await self._connection(worker)
        if connection is None or connection.channel.lost is not None:
            return False
        return not _is_stopped(connection.channel.pid)

    async def _connection(self, worker: str) -> _Connection | None:
        """Return the one connection to a peer, made at the first request; None when the peer is
        not on this host.
        """
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
            if connecting.done():
                connection = connecting.result()
                if connection is not None:
                    connection.channel.close()
            connecting.cancel()

    def _name(self, worker: str) -> str:
        return socket_name(self._run, worker, self._members[worker])

    def _accept(self) -> _Channel:
        channel = _Channel(self._serve, self._served.discard)
        self._served.add(channel)
        return channel

    def _serve(self, channel: _Channel, message: wire.Message) -> None:
        channel.keep(asyncio.create_task(self._answer(channel, message)))

    async def _answer(self, channel: _Channel, message: wire.Message) -> None:
        try:
            head, frames = await answer_to(message.head, self._run, self._handler)
        except Aborted:
            channel.close()  # the peer is being aborted as well
        else:
            channel.send(message.number, head, frames)


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
            self.channel.allow(request.reply_bounds)
            self.channel.send(number, request.pack())
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _on_message(self, channel: _Channel, message: wire.Message) -> None:
        answer = self._waiting.get(message.number)
        if answer is None or answer.done():
            return
        try:
            answer.set_result(Reply.of(message))
        except PeerError as refusal:
            answer.set_exception(refusal)

    def _on_close(self, channel: _Channel) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"the connection was closed: {channel.lost}"))


class _Channel(asyncio.Protocol):
    """Sends and receives messages over one socket. A protocol: a stream would take twice the time
    for a short message.

    ``on_message`` is called with each message, ``on_close`` once the connection is closed, for the
    reason in ``lost``.
    """

    def __init__(
        self,
        on_message: Callable[[_Channel, wire.Message], None],
        on_close: Callable[[_Channel], None],
    ) -> None:
        self.lost: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self.pid = 0
        """The process on the other side; 0 where it is in another PID namespace."""
        self._on_message = on_message
        self._on_close = on_close
        self._bounds = wire.REQUEST
        self._received = bytearray()
        self._needed = wire.PRELUDE.size
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.lost is not None:  # it was closed before the loop called this
            transport.abort()
            return
        try:
            self.pid = _check_user(transport)
        except PeerError as error:
            self._refuse(error)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while len(self._received) >= self._needed:
                message = self._next()
                if message is not None:
                    self._on_message(self, message)
        except PeerError as error:
            self._refuse(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self.lost is None:
            self.lost = ConnectionError("the peer has closed it") if error is None else error
        for task in self._tasks:
            task.cancel()
        self._on_close(self)

    def send(self, number: int, head: object, frames: Sequence[Frame] = ()) -> None:
        buffers = wire.pack(number, head, frames)
        if self.lost is None and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(buffers)

    def allow(self, bounds: wire.MessageBounds) -> None:
        """Allow for replies of this size: this side has asked for one. An earlier one may be on
        its way still.
        """
        head = max(bounds.head, self._bounds.head)
        frames = max(bounds.frames, self._bounds.frames)
        self._bounds = wire.MessageBounds(head, frames)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task until it is done, and cancel it when the connection is
        lost.
        """
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        if self.lost is None:
            self.lost = ConnectionError("the connection was closed from this side")
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, error: PeerError) -> None:
        logger.warning("closed a connection: %s", error)
        self.lost = error
        self._received.clear()
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> wire.Message | None:
        """Return the next message once all of it is there; until then, record how many bytes are
        needed to go on.
        """
        prelude = wire.read_prelude(self._received, self._bounds)
        start = wire.PRELUDE.size + prelude.top
        if len(self._received) < start:
            self._needed = start
            return None
        top = bytes(self._received[wire.PRELUDE.size : start])
        sizes = wire.read_sizes(prelude, top, self._bounds)
        end = start + sum(sizes)
        if len(self._received) < end:
            self._needed = end
            return None
        # A bytearray with a view cannot shrink, so each view is released by name: a profiler that
        # holds the frame of this or of a called function, as Dask's does now and then, keeps them
        # alive.
        with memoryview(self._received) as received, received[start:end] as body:
            views = wire.split(body, sizes)
            frames = [bytes(view) for view in views]
            for view in views:
                view.release()
        del self._received[:end]
        self._needed = wire.PRELUDE.size
        return wire.read_message(prelude, top, frames)


async def _connect(name: str) -> _Connection | None:
    connection = _Connection()
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: connection.channel, name)
    except OSError:
        return None
    return None if connection.channel.lost is not None else connection


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() in _STOPPED)
    except psutil.Error:  # it may be of another PID namespace, or hidden
        return False


def _check_user(transport: asyncio.Transport) -> int:
    """Return the process on the other side. PeerError unless it is of this user."""
    credentials = transport.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise PeerError(f"process {pid} of user {uid} was refused")
    return int(pid)
