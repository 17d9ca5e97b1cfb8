"""Carries rows between hosts, over plain TCP connections of their own that threads read and write.

An event loop wakes up for every few packets: at 1 Gbit/s it took 2.5 times the CPU of a thread that waits in the kernel
until a frame is there. Only fetches of rows come this way; what is small goes over Dask's comms, where a peer also
learns the port and the token with which it must begin. A connection carries one request at a time, so how many a peer
asks for at once is how many streams share the link.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, TypeVar

import numpy as np

from siirl_dask.coordinator.transport.frames import Frame
from siirl_dask.coordinator.transport.heads import LENGTH, pack_message, read_head, read_length
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request, TransitionKey, read_request
from siirl_dask.coordinator.transport.peers import Carrier
from siirl_dask.errors import Aborted, PeerError, SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
STREAMS = 8
"""Streams into a worker at once: enough for a link of 10 ms, where the kernel's buffers limit each to 1 Gbit/s."""
_SENDERS = 32  # threads: targets that take their time must not keep the others waiting
TOKEN_BYTES = 32
_VECTORS = 512  # buffers in one call of sendmsg: the kernel takes 1,024
_LOST_AFTER = 30  # seconds in which no byte was acknowledged, as for Dask's comms
_PAUSE = 0.5  # seconds before accepting again, where there are too many open files
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker takes streams."""

    host: str
    port: int
    token: bytes


class StreamServer:
    """Answers the fetches of peers that know its token, with ``handler``. Belongs to the event loop."""

    def __init__(self, run: str, host: str, handler: Handler, timeout: float) -> None:
        """``timeout`` is the seconds within which a peer that has connected must have sent its token."""
        self._run = run
        self._host = host
        self._handler = handler
        self._timeout = timeout
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._threads = ThreadPoolExecutor(_SENDERS, thread_name_prefix="siirl-send")
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port. OSError where the host is no address of this machine."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server((self._host, 0), family=family, backlog=512)
        self._socket.setblocking(False)
        self._keep(asyncio.create_task(self._accept()))

    @property
    def place(self) -> Place:
        return Place(self._host, self._socket.getsockname()[1], self._token)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                logger.warning("no stream of rows can be accepted: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            self._keep(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            _set_up(connection)
            connection.setblocking(False)
            async with asyncio.timeout(self._timeout):
                token = await _receive(connection, TOKEN_BYTES)
            if not compare_digest(token, self._token):
                raise PeerError("a stream that began with another token")
            while True:
                length = read_length(await _receive(connection, LENGTH.size))
                _, head, _ = read_head(await _receive(connection, length))
                await self._answer(connection, head)
        except (OSError, Aborted) as error:  # TimeoutError is an OSError
            logger.debug("a stream of rows ended: %s", error)
        except PeerError as error:
            logger.warning("closed a stream of rows: %s", error)
        finally:
            connection.close()

    async def _answer(self, connection: socket.socket, head: object) -> None:
        try:
            reply = await self._handler(read_request(self._run, head))
            said: Any = reply.header
        except Aborted:
            raise
        except SiirlError as error:
            said, reply = str(error), Reply()  # a head of text is a refusal
        except Exception:
            logger.exception("a request of run %s failed", self._run)
            said, reply = "it failed on a bug: see the worker's log", Reply()
        await _in_thread(self._threads, connection, _send, pack_message(0, said, reply.frames))


class StreamClient:
    """Asks peers over streams, at most ``STREAMS`` at a time. Belongs to the event loop."""

    def __init__(self, timeout: float) -> None:
        """``timeout`` is the seconds that a connection may take to open."""
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="siirl-receive")
        self._idle: dict[Place, list[socket.socket]] = {}
        self._busy: set[socket.socket] = set()

    async def open(self, place: Place) -> None:
        """Open a connection for the first request. OSError where nothing answers there."""
        self._idle.setdefault(place, []).append(await self._connect(place))

    async def ask(self, place: Place, request: Request) -> Reply:
        """Send a request and return the reply. OSError when the connection breaks, PeerError when it is refused."""
        idle = self._idle.setdefault(place, [])
        connection = idle.pop() if idle else await self._connect(place)
        self._busy.add(connection)
        try:
            buffers = pack_message(0, request.pack(), ())
            head, frames = await _in_thread(self._threads, connection, _exchange, buffers)
        except OSError:
            while idle:  # they are as old as this one
                idle.pop().close()
            raise
        finally:
            self._busy.discard(connection)
        idle.append(connection)
        if not isinstance(head, dict):
            raise PeerError(str(head))
        return Reply(head, frames)

    async def close(self) -> None:
        for connection in self._busy:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for connection in (connection for idle in self._idle.values() for connection in idle):
            connection.close()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _connect(self, place: Place) -> socket.socket:
        connecting = self._threads.submit(_connect, place, self._timeout)
        return await asyncio.wrap_future(connecting)


class RowStreams:
    """Carries fetches over streams to the peers that take them, and all else over another carrier.

    A peer is asked once, over the other carrier, where it takes streams. Where it takes none, or no connection gets
    there, its rows come over the other carrier too.
    """

    def __init__(self, run: str, hosts: Mapping[str, str], carrier: Carrier, timeout: float) -> None:
        """``hosts`` has the address of each member's host."""
        self._hello = TransitionKey(run, -1, "streams")
        self._hosts = hosts
        self._carrier = carrier
        self._client = StreamClient(timeout)
        self._places: dict[str, asyncio.Task[Place | None]] = {}

    async def reaches(self, worker: str) -> bool:
        return await self._carrier.reaches(worker)

    async def ask(self, worker: str, request: Request) -> Reply:
        if request.op == Op.FETCH and (place := await self._place(worker)) is not None:
            return await self._client.ask(place, request)
        return await self._carrier.ask(worker, request)

    async def close(self) -> None:
        for finding in self._places.values():
            finding.cancel()
        await self._client.close()
        await self._carrier.close()

    async def _place(self, worker: str) -> Place | None:
        finding = self._places.get(worker)
        if finding is None or (finding.done() and (finding.cancelled() or finding.exception() is not None)):
            finding = self._places[worker] = asyncio.create_task(self._find(worker))
        return finding.result() if finding.done() else await asyncio.shield(finding)

    async def _find(self, worker: str) -> Place | None:
        reply = await self._carrier.ask(worker, Request(Op.STREAMS, self._hello))
        match reply.header:
            case {"port": int(port), "token": bytes(token)} if 0 < port < 2**16 and len(token) == TOKEN_BYTES:
                place = Place(self._hosts[worker], port, token)
            case _:
                return None
        try:
            await self._client.open(place)
        except OSError as error:
            logger.warning("rows of worker %r come over Dask's connections: port %d: %s", worker, port, error)
            return None
        return place


def _connect(place: Place, timeout: float) -> socket.socket:
    connection = socket.create_connection((place.host, place.port), timeout)
    _set_up(connection)
    connection.settimeout(None)
    connection.sendall(place.token)
    return connection


def _set_up(connection: socket.socket) -> None:
    """Send what is small at once, and notice a peer whose host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER * 1000)


async def _in_thread(
    threads: ThreadPoolExecutor, connection: socket.socket, work: Callable[..., _T], *arguments: object
) -> _T:
    """Return what blocking work on a connection gives. If it fails or is cancelled, the connection is closed."""
    running = threads.submit(work, connection, *arguments)
    try:
        return await asyncio.wrap_future(running)
    except BaseException:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # the thread, which may be inside a call, comes back
        running.add_done_callback(lambda _: connection.close())
        raise


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes, without a thread. ConnectionError when the peer closes."""
    loop, received = asyncio.get_running_loop(), bytearray()
    while len(received) < size:
        if not (data := await loop.sock_recv(connection, size - len(received))):
            raise ConnectionError("the peer has closed it")
        received += data
    return bytes(received)


def _send(connection: socket.socket, buffers: Sequence[Frame]) -> None:
    """Send buffers one after the other."""
    connection.setblocking(True)
    left = [view for view in map(memoryview, buffers) if view.nbytes]
    while left:
        sent = connection.sendmsg(left[:_VECTORS])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]
    connection.setblocking(False)


def _exchange(connection: socket.socket, buffers: Sequence[Frame]) -> tuple[object, list[memoryview]]:
    """Send a request and return the head and the frames of the reply."""
    for buffer in buffers:
        connection.sendall(buffer)
    length = read_length(_fill(connection, LENGTH.size))
    _, head, sizes = read_head(_fill(connection, length))
    return head, [_fill(connection, size) for size in sizes]


def _fill(connection: socket.socket, size: int) -> memoryview:
    """Return the next bytes, which may be written to. ConnectionError when the peer closes."""
    buffer = np.empty(size, np.uint8).data
    left = buffer
    while left.nbytes:
        if not (count := connection.recv_into(left, left.nbytes, socket.MSG_WAITALL)):
            raise ConnectionError("the peer has closed it")
        left = left[count:]
    return buffer
