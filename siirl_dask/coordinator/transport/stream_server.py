"""Answers fetches of rows that come over streams (``streams``): one after the other on each connection."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from hmac import compare_digest
from typing import Any

from siirl_dask.coordinator.transport.frames import Frame
from siirl_dask.coordinator.transport.heads import LENGTH, pack_message, read_head, read_length
from siirl_dask.coordinator.transport.messages import Handler, Reply, read_request
from siirl_dask.coordinator.transport.stream_connection import TOKEN_BYTES, Connection, Place, send
from siirl_dask.errors import Aborted, PeerError, SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
_SENDERS = 32  # threads: targets that take their time must not keep the others waiting
_PAUSE = 0.5  # seconds before accepting again, where there are too many open files


class StreamServer:
    """Answers peers that know its token, with ``handler``. Belongs to the event loop."""

    def __init__(self, run: str, host: str, handler: Handler, timeout: float) -> None:
        """``timeout`` is the seconds within which a peer that has connected must have sent the token."""
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
        self._keep(self._accept())

    @property
    def place(self) -> Place:
        return Place(self._host, self._socket.getsockname()[1], self._token)

    async def close(self) -> None:
        """Close all connections and listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                logger.warning("no stream of rows can be accepted: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            self._keep(self._serve(Connection(accepted)))

    async def _serve(self, connection: Connection) -> None:
        try:
            connection.socket.setblocking(False)
            async with asyncio.timeout(self._timeout):
                token = await _receive(connection, TOKEN_BYTES)
            if not compare_digest(token, self._token):
                raise PeerError("it began with another token")
            while True:
                length = read_length(await _receive(connection, LENGTH.size))
                _, head, _ = read_head(await _receive(connection, length))
                await self._answer(connection, head)
        except (OSError, Aborted) as error:  # a TimeoutError is an OSError; a peer that is aborted closes
            logger.debug("a stream of rows ended: %s", error)
        except PeerError as error:
            logger.warning("closed a stream of rows: %s", error)
        finally:
            connection.close()

    async def _answer(self, connection: Connection, head: object) -> None:
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
        await connection.in_thread(self._threads, _send, pack_message(0, said, reply.frames))


async def _receive(connection: Connection, size: int) -> bytes:
    """Return the next bytes, without a thread. ConnectionError when the peer closes."""
    loop, received = asyncio.get_running_loop(), bytearray()
    while len(received) < size:
        if not (data := await loop.sock_recv(connection.socket, size - len(received))):
            raise ConnectionError("the peer has closed it")
        received += data
    return bytes(received)


def _send(connected: socket.socket, buffers: list[Frame]) -> None:
    """Send while the socket blocks; it goes back to the event loop afterwards."""
    connected.setblocking(True)
    send(connected, buffers)
    connected.setblocking(False)
