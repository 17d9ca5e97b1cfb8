"""Carries fetches of rows between hosts, over plain TCP connections of their own; all else takes another carrier.

How many fetches a worker makes at once is how many streams share the link to it, so that a link of long delay, where
the kernel's buffers limit each stream, is filled as well. A stream takes two fetches, the second while the rows of the
first are on their way: between two messages no time passes in which the peer has nothing to send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from siirl_dask.coordinator.transport.heads import pack_message
from siirl_dask.coordinator.transport.messages import Op, Reply, Request, TransitionKey
from siirl_dask.coordinator.transport.peers import Carrier
from siirl_dask.coordinator.transport.stream_connection import TOKEN_BYTES, Connection, Place, connect, receive, send
from siirl_dask.errors import PeerError

logger = logging.getLogger("siirl_dask.coordinator")
STREAMS = 8
"""Streams into a worker at once: they fill a link of 10 Gbit/s and 10 ms where the kernel's buffers have 4 MB each."""
FETCHES = 2
"""Fetches under way on a stream."""


class RowStreams:
    """Carries fetches over streams to the peers that take them, and everything else over ``carrier``.

    A peer is asked once, over the other carrier, where it takes streams. Where it takes none, or where no connection
    gets there, its rows come over the other carrier as well.
    """

    def __init__(self, run: str, hosts: Mapping[str, str], carrier: Carrier, timeout: float) -> None:
        """``hosts`` has the address of each member's host; a stream opens within ``timeout`` seconds, or not at all."""
        self._hello = TransitionKey(run, -1, "streams")
        self._hosts = hosts
        self._carrier = carrier
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(2 * STREAMS, thread_name_prefix="siirl-stream")
        self._peers: dict[str, asyncio.Task[_Peer | None]] = {}

    async def reaches(self, worker: str) -> bool:
        return await self._carrier.reaches(worker)

    async def ask(self, worker: str, request: Request) -> Reply:
        if request.op == Op.FETCH and (peer := await self._peer(worker)) is not None:
            return await peer.ask(request)
        return await self._carrier.ask(worker, request)

    async def close(self) -> None:
        for finding in self._peers.values():
            finding.cancel()
        for found in await asyncio.gather(*self._peers.values(), return_exceptions=True):
            if isinstance(found, _Peer):
                found.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._carrier.close()

    async def _peer(self, worker: str) -> _Peer | None:
        finding = self._peers.get(worker)
        if finding is None or (finding.done() and (finding.cancelled() or finding.exception() is not None)):
            finding = self._peers[worker] = asyncio.create_task(self._find(worker))
        return finding.result() if finding.done() else await asyncio.shield(finding)

    async def _find(self, worker: str) -> _Peer | None:
        """Return how to reach a peer over streams; None where it takes none."""
        reply = await self._carrier.ask(worker, Request(Op.STREAMS, self._hello))
        match reply.header:
            case {"port": int(port), "token": bytes(token)} if 0 < port < 2**16 and len(token) == TOKEN_BYTES:
                peer = _Peer(Place(self._hosts[worker], port, token), self._threads, self._timeout)
            case _:
                return None
        try:
            await peer.open()
        except OSError as error:
            logger.warning("rows of worker %r come over Dask's connections: port %d: %s", worker, port, error)
            return None
        return peer


class _Stream:
    """One connection, and the fetches under way on it. They are sent and answered in one order."""

    def __init__(self, opening: asyncio.Task[Connection]) -> None:
        self.fetches = 0
        self._opening = opening
        self._sending = asyncio.Lock()
        self._receiving = asyncio.Lock()

    @property
    def usable(self) -> bool:
        opening = self._opening
        return not opening.done() or (
            not opening.cancelled() and opening.exception() is None and not opening.result().lost
        )

    async def opened(self) -> Connection:
        return await asyncio.shield(self._opening)

    async def ask(self, request: Request, threads: ThreadPoolExecutor) -> Reply:
        connection = await self.opened()
        try:
            async with self._sending:
                await connection.in_thread(threads, send, pack_message(0, request.pack(), ()))
            async with self._receiving:  # locks are fair, and nothing is awaited in between: the order stays
                head, frames = await connection.in_thread(threads, receive)
        except BaseException:
            connection.close()  # a reply to a request that was given up may still come
            raise
        if not isinstance(head, dict):
            raise PeerError(str(head))
        return Reply(head, frames)

    def close(self) -> None:
        if self.usable and self._opening.done():
            self._opening.result().close()
        self._opening.cancel()


class _Peer:
    """The streams to one peer."""

    def __init__(self, place: Place, threads: ThreadPoolExecutor, timeout: float) -> None:
        self._place = place
        self._threads = threads
        self._timeout = timeout
        self._streams: list[_Stream] = []

    async def open(self) -> None:
        """Open the first stream. OSError where nothing answers."""
        await self._new().opened()

    async def ask(self, request: Request) -> Reply:
        """Send a fetch over the stream that has the fewest. OSError when its connection breaks."""
        self._streams = [stream for stream in self._streams if stream.usable]
        free = [stream for stream in self._streams if stream.fetches < FETCHES]
        stream = min(free, key=lambda stream: stream.fetches) if free else self._new()
        stream.fetches += 1
        try:
            return await stream.ask(request, self._threads)
        except OSError:
            for other in self._streams:
                if not other.fetches:
                    other.close()  # it is as old as the one that broke
            raise
        finally:
            stream.fetches -= 1

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _new(self) -> _Stream:
        stream = _Stream(asyncio.create_task(self._connect()))
        self._streams.append(stream)
        return stream

    async def _connect(self) -> Connection:
        return Connection(await asyncio.wrap_future(self._threads.submit(connect, self._place, self._timeout)))
