"""Carries requests between hosts over byte streams that Dask's comms open: tcp or tls, as the
cluster speaks.

Dask provides the addresses, the connections, their keep-alive and the certificates. It reads no
byte of them: a listener of one's own leaves out Dask's handshake, which unpickles what arrives as
every message of Dask's does, and the format is that of ``wire``. Neither the scheduler nor the
client sees any of it.

A connection carries one request at a time, and there are as many as requests are under way: the
kernel's buffers limit one over the round trip, several fill the link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.comm.addressing import (
    get_address_host,
    parse_address,
    parse_host_port,
    unparse_address,
    unparse_host_port,
)
from distributed.comm.core import FatalCommClosedError
from distributed.comm.registry import get_backend
from distributed.comm.tcp import BaseTCPBackend

from siirl_dask.coordinator.transport import wire
from siirl_dask.coordinator.transport.messages import Handler, Reply, Request, answer_to
from siirl_dask.coordinator.transport.wire import Frame
from siirl_dask.errors import Aborted, ConfigError, PeerError

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.comm.core import Comm

logger = logging.getLogger("siirl_dask.coordinator")
_MAGIC = b"siirl\x00\x00\x01"
_HELLO_TIMEOUT = 10.0  # seconds for a connection to say which run it is of
# of the timeout: seconds for one attempt to connect; behind a link that was down a new one is
# quicker
_ATTEMPT = 0.2
_PAUSE = 0.1  # seconds between two attempts
_LOOKS = 4  # attempts to reach the listener of a peer that answers nothing
_MAX_IDLE = 512  # connections held for the next requests
_PER_MEMBER = 64  # connections that each member may have here
_SMALL = 2**17  # bytes: a message up to this is sent as one buffer and read as one
_LARGEST_PIECE = 2**30  # bytes: TLS takes no 2 GiB at once


def _hello(run: str) -> bytes:
    """Return the first bytes of a connection. A run that listens here later, at the same port,
    is another.
    """
    return _MAGIC + sha256(run.encode()).digest()


_HELLO_SIZE = len(_hello(""))


class DaskStreams:
    """Carries requests to the members of a run, and answers theirs. Belongs to the event loop.

    ``members`` is {name: Dask address}; ``timeout`` is the seconds that a connection may take to
    open.
    """

    def __init__(
        self, worker: Worker, run: str, members: Mapping[str, str], handler: Handler, timeout: float
    ) -> None:
        self._worker = worker
        self._run = run
        self._members = members
        self._handler = handler
        self._timeout = timeout
        self._addresses: dict[str, str] = {}
        self._idle: dict[str, list[_Stream]] = {}
        self._served: set[Comm] = set()
        self._open: set[_Stream] = set()
        self._listener: Any = None

    async def start(self) -> int:
        """Listen on the interface of the worker's own address, and return the port. ConfigError
        where that fails.
        """
        address = self._worker.address
        scheme, _ = parse_address(address)
        backend = get_backend(scheme)
        if not isinstance(backend, BaseTCPBackend):
            raise ConfigError(
                f"worker {self._worker.name!r} is at {address}: rows travel over byte streams, "
                f"which {scheme}:// has not; start the cluster with protocol tcp or tls (weights "
                "between accelerators go by nccl or hccl)"
            )
        place = unparse_host_port(get_address_host(address), 0)
        security = self._worker.security.get_listen_args("worker")
        self._listener = backend.get_listener(place, self._serve, deserialize=False, **security)
        self._listener.on_connection = _no_handshake
        try:
            await self._listener.start()
        except OSError as error:
            raise ConfigError(
                f"worker {self._worker.name!r} at {address} cannot listen on {place}: {error}; "
                "expected the address of an interface of its host (dask worker --host)"
            ) from error
        return int(self._listener.get_host_port()[1])

    def meet(self, ports: Mapping[str, int]) -> None:
        """Learn the ports of all members. None is asked before."""
        for worker, port in ports.items():
            scheme, _ = parse_address(self._members[worker])
            host = get_address_host(self._members[worker])
            self._addresses[worker] = unparse_address(scheme, unparse_host_port(host, port))

    async def reaches(self, worker: str) -> bool:
        return worker in self._addresses

    async def ask(self, worker: str, request: Request) -> Reply:
        stream = self._take_idle(worker)
        if stream is None:
            stream = await self._connect(self._addresses[worker])
        try:
            await stream.send(wire.pack(0, request.pack()))
            reply = await stream.receive(request.reply_bounds)
        except BaseException:
            # a reply may still be on its way: this connection cannot be used again
            self._drop(stream)
            raise
        self._put_back(worker, stream)
        return Reply.of(reply)

    async def runs(self, worker: str, seconds: float) -> bool:
        """The kernel takes a connection for a process that listens, whatever that does, and
        refuses one for another.
        """
        if worker not in self._addresses:
            return False
        _, place = parse_address(self._addresses[worker])
        host, port = parse_host_port(place)
        loop = asyncio.get_running_loop()
        attempt = seconds / _LOOKS
        end = loop.time() + seconds
        while loop.time() < end:
            # TimeoutError as well: the way to it may be up again a moment later
            with suppress(OSError):
                async with asyncio.timeout(attempt):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
            await asyncio.sleep(min(_PAUSE, attempt))
        return False

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        for stream in self._open:
            stream.comm.abort()
        for comm in self._served:
            comm.abort()

    def _take_idle(self, worker: str) -> _Stream | None:
        idle = self._idle.get(worker, [])
        while idle:
            stream = idle.pop()
            if not stream.comm.closed():
                return stream
            self._open.discard(stream)
        return None

    def _put_back(self, worker: str, stream: _Stream) -> None:
        if sum(map(len, self._idle.values())) < _MAX_IDLE:
            self._idle.setdefault(worker, []).append(stream)
        else:
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        stream.comm.abort()
        self._open.discard(stream)

    async def _connect(self, address: str) -> _Stream:
        """Open a connection, and try again while there is time: a link may be down for a moment.
        OSError when not.
        """
        loop = asyncio.get_running_loop()
        scheme, place = parse_address(address)
        connector = get_backend(scheme).get_connector()
        end = loop.time() + self._timeout
        while True:
            try:
                async with asyncio.timeout(self._timeout * _ATTEMPT):
                    security = self._worker.connection_args
                    stream = _Stream(await connector.connect(place, deserialize=False, **security))
                break
            except FatalCommClosedError:  # the certificates do not match
                raise
            except OSError as error:  # TimeoutError as well
                if loop.time() + _PAUSE > end:
                    raise ConnectionError(
                        f"no connection to {address} within {self._timeout:g} s: {error}"
                    ) from error
                await asyncio.sleep(_PAUSE)
        self._open.add(stream)
        await stream.send([_hello(self._run)])
        return stream

    async def _serve(self, comm: Comm) -> None:
        """Answer the requests of one connection until it ends."""
        if len(self._served) >= _PER_MEMBER * len(self._members):
            logger.warning(
                "refused a connection from %s: there are %d", comm.peer_address, len(self._served)
            )
            comm.abort()
            return
        self._served.add(comm)
        try:
            await self._answer_all(_Stream(comm))
        except OSError:
            # the peer has closed it, or is gone: whoever waits for that peer learns it by pings
            pass
        except Aborted:
            pass  # the peer is being aborted as well
        except PeerError as error:
            logger.warning("closed a connection from %s: %s", comm.peer_address, error)
        finally:
            self._served.discard(comm)
            comm.abort()

    async def _answer_all(self, stream: _Stream) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT):
            if await stream.read(_HELLO_SIZE) != _hello(self._run):
                raise PeerError(f"it is no connection of run {self._run}")
        while True:
            await (await self._answer_next(stream))

    async def _answer_next(self, stream: _Stream) -> asyncio.Future[None]:
        """Begin to send the answer to the next request. Nothing here refers to its frames any more:
        each is freed as soon as its last byte is out.
        """
        request = await stream.receive(wire.REQUEST)
        head, frames = await answer_to(request.head, self._run, self._handler)
        return stream.send(wire.pack(request.number, head, frames))


@dataclass(frozen=True, eq=False, slots=True)
class _Stream:
    """Sends and receives messages over the byte stream of one of Dask's comms."""

    comm: Comm

    def send(self, buffers: Sequence[Frame]) -> asyncio.Future[None]:
        """Begin to send buffers. What is returned is done when the last byte is out."""
        stream = self._stream()
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if sum(view.nbytes for view in views) <= _SMALL:
            views = [memoryview(b"".join(views))]
        for view in views:
            for piece in _pieces(view):
                sent: asyncio.Future[None] = stream.write(piece)
        return sent

    async def receive(self, bounds: wire.MessageBounds) -> wire.Message:
        """Return the next message. OSError at the end of the stream, PeerError for what is no
        message.
        """
        prelude = wire.read_prelude(await self.read(wire.PRELUDE.size), bounds)
        top = await self.read(prelude.top)
        sizes = wire.read_sizes(prelude, top, bounds)
        if sum(sizes) <= _SMALL:
            return wire.read_message(
                prelude, top, wire.split(memoryview(await self.read(sum(sizes))), sizes)
            )
        frames: list[Frame] = []
        for size in sizes:
            frame = np.empty(
                size, np.uint8
            ).data  # each its own, to be freed by itself; not filled with zeros first
            for piece in _pieces(frame):
                await self._stream().read_into(piece)
            frames.append(frame)
        return wire.read_message(prelude, top, frames)

    async def read(self, size: int) -> bytes:
        data: bytes = await self._stream().read_bytes(size)
        return data

    def _stream(self) -> Any:
        stream = self.comm.stream  # type: ignore[attr-defined]  # comms of a BaseTCPBackend have one
        if stream is None:
            raise ConnectionError("the connection is closed")
        return stream


def _pieces(view: memoryview) -> list[memoryview]:
    """Cut a buffer into pieces that a stream takes at once."""
    bounds = [*range(0, view.nbytes, _LARGEST_PIECE), view.nbytes]
    return [view[first:last] for first, last in pairwise(bounds)]


async def _no_handshake(comm: Comm, handshake_overrides: object = None) -> None:
    """Take the place of Dask's handshake, which would unpickle what it is sent."""
