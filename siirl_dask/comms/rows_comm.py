"""A connection that carries plain data as Dask's comms do, and rows without a copy."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from distributed.comm.core import Comm, CommClosedError

from siirl_dask.comms import wire
from siirl_dask.comms.byte_stream import CommStream
from siirl_dask.comms.proofs import NONCE_BYTES, Side, new_nonce, proof_of
from siirl_dask.comms.sockets import Scheme
from siirl_dask.comms.wire import Frame, Message, MessageBounds, Pieces
from siirl_dask.dask_internals import FatalCommClosedError
from siirl_dask.errors import PeerError

logger = logging.getLogger("siirl_dask.comms")
_SMALL = 2**15  # bytes: frames up to this together are read as one
_ONE_RECORD = 2**17  # bytes: messages up to this go to TLS as one buffer
_WIRE = "siirl_dask.wire"  # of the handshake: the version of the format
_NONCE = "siirl_dask.nonce"  # of the handshake: what the proofs of this connection are made of
_REFUSED = "refused"  # in the place of a proof

Places = Callable[[object, Sequence[int]], Sequence[Pieces | None]]
"""Returns where frames go that are about to arrive, from the message's head and their sizes in
bytes: for each of the first frames its place, or None for memory of its own. It raises PeerError
for a head or sizes that are not what was asked for, before a byte is received."""


class RowsComm(Comm):
    """One side of a connection.

    One message at a time goes each way. A peer that sends what is malformed or too large, and a
    read or a write that is cancelled, close it.
    """

    def __init__(
        self,
        stream: CommStream,
        scheme: Scheme,
        local: str,
        peer: str,
        *,
        deserialize: bool = True,
    ) -> None:
        """``local`` and ``peer`` are the locations of both sides, without the scheme."""
        super().__init__(deserialize=deserialize)
        self._stream = stream
        self._scheme = scheme
        # names that Dask's connect() reads
        self._local_addr = scheme.prefix + local
        self._peer_addr = scheme.prefix + peer

    async def send(
        self,
        head: object,
        frames: Sequence[Frame | Pieces] = (),
        number: int = 0,
    ) -> int:
        """Send a message, and return its bytes once the kernel has them; until then ``frames`` are
        referred to. CommClosedError where the connection is closed, TypeError for a head that is no
        plain data.
        """
        try:
            views = wire.pack(number, head, frames)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{self._scheme} carries plain data only: {error}") from error
        nbytes = sum(view.nbytes for view in views)
        if self._stream.is_tls and nbytes <= _ONE_RECORD:
            views = [memoryview(b"".join(views))]
        try:
            await self._stream.write(views)
        except OSError as error:
            raise CommClosedError(f"{self._peer_addr}: {error}") from error
        return nbytes

    async def receive(self, bounds: MessageBounds, places: Places | None = None) -> Message:
        """Return the next message; frames with a place of ``places`` are received into it.

        CommClosedError at the end of the connection, PeerError for what is no message, is beyond
        ``bounds``, or does not fit its places.
        """
        try:
            return await self._receive(bounds, places)
        except PeerError:
            self.abort()  # what follows cannot be told from this message
            raise
        except OSError as error:
            raise CommClosedError(f"{self._peer_addr}: {error}") from error

    async def _receive(self, bounds: MessageBounds, places: Places | None) -> Message:
        stream = self._stream
        prelude = wire.read_prelude(await stream.read(wire.PRELUDE.size), bounds)
        top = await stream.read(prelude.top)
        if not prelude.frames:
            return wire.read_message(prelude, top, ())
        sizes = wire.read_sizes(prelude, top, bounds)
        if places is not None:
            return await self._receive_placed(prelude, top, sizes, places)
        if sum(sizes) <= _SMALL:
            body = memoryview(await stream.read(sum(sizes)))
            return wire.read_message(prelude, top, wire.split(body, sizes))
        frames = [_new_frame(size) for size in sizes]
        await stream.read_into(frames)
        return wire.read_message(prelude, top, frames)

    async def _receive_placed(
        self,
        prelude: wire.Prelude,
        top: bytes | bytearray,
        sizes: Sequence[int],
        places: Places,
    ) -> Message:
        # long values of the head are still to come: empty until then
        announced = wire.read_message(prelude, top, [b""] * len(sizes))
        own = len(announced.frames)
        chosen = [*places(announced.head, sizes[:own])]
        chosen += [None] * (len(sizes) - len(chosen))
        frames: list[Frame | Pieces] = []
        views: list[memoryview] = []
        for size, place in zip(sizes, chosen, strict=True):
            if place is None:
                frame = _new_frame(size)
                frames.append(frame)
                views.append(frame)
                continue
            if place.nbytes != size:
                raise PeerError(f"received {size} bytes of rows: expected {place.nbytes}")
            frames.append(place)
            views.extend(place.views)
        await self._stream.read_into(views)
        return wire.read_message(prelude, top, frames)

    async def authenticate(self, secret: bytes, side: Side) -> None:
        """Prove to the peer that this side knows ``secret``, and have the peer prove it, right
        after Dask's handshake. CommClosedError where the connection ends meanwhile,
        FatalCommClosedError where the peer has another secret.
        """
        nonces = {side: self.local_info[_NONCE], side.other: self.remote_info[_NONCE]}
        proofs = {
            each: proof_of(secret, each, nonces[Side.ASKS], nonces[Side.ANSWERS]) for each in Side
        }
        if side is Side.ASKS:
            await self.send(proofs[side], number=wire.GREETING)
        try:
            message = await self.receive(wire.PROOF)
        except PeerError as error:
            raise self._refused(error) from error
        proof = message.head
        if not isinstance(proof, bytes) or not hmac.compare_digest(proof, proofs[side.other]):
            if side is Side.ANSWERS:
                with suppress(CommClosedError):
                    await self.send(_REFUSED, number=wire.GREETING)
            raise self._refused(PeerError("it is no connection of this run"))
        if side is Side.ANSWERS:
            await self.send(proofs[side], number=wire.GREETING)

    def while_open(self) -> WhileOpen:
        """Return a context that is cancelled when the peer closes the connection, or this side
        does, and raises CommClosedError then.
        """
        return WhileOpen(self._stream, self._peer_addr)

    def _refused(self, error: PeerError) -> FatalCommClosedError:
        """Close the connection of a peer that no further attempt can cure, and return the error."""
        self.abort()
        logger.warning("closed a connection from %s: %s", self._peer_addr, error)
        return FatalCommClosedError(f"{self._peer_addr}: {error}")

    # What Dask calls.

    async def write(self, msg: Any, serializers: Any = None, on_error: Any = None) -> int:
        """Send plain data, the handshake first. TypeError for anything else: nothing is pickled."""
        return await self.send(msg, number=0 if self.remote_info else wire.GREETING)

    async def read(self, deserializers: Any = None) -> Any:
        """Return the plain data that the peer sent, its handshake first."""
        bounds = wire.REQUEST if self.remote_info else wire.HANDSHAKE
        try:
            message = await self.receive(bounds)
            if not self.remote_info:
                _check_handshake(message.head)
        except PeerError as error:
            raise self._refused(error) from error
        return message.head

    async def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.close()

    def closed(self) -> bool:
        return self._stream.closed

    def handshake_info(self) -> dict[str, Any]:
        return {_WIRE: wire.VERSION, _NONCE: new_nonce()}

    @staticmethod
    def handshake_configuration(local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:
        """Nothing has to be agreed: ``read`` has refused another version."""
        return {}

    @property
    def local_address(self) -> str:
        return self._local_addr

    @property
    def peer_address(self) -> str:
        return self._peer_addr

    @property
    def same_host(self) -> bool:
        if self._scheme is Scheme.UNIX:
            return True
        return bool(super().same_host)

    @property
    def extra_info(self) -> dict[str, Any]:
        """The peer's process over a Unix socket, its certificate and the cipher over TLS."""
        return {} if self.closed() else self._stream.peer_info()


class WhileOpen:
    """Cancels the task that is inside when a stream ends. Unlike ``asyncio.timeout`` it costs a
    request next to nothing as long as the stream does not end.
    """

    __slots__ = ("_before", "_ended", "_has_cancelled", "_peer", "_stream", "_task")

    def __init__(self, stream: CommStream, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        """Times that the task had been cancelled when it came in."""
        self._ended: asyncio.Handle | None = None
        self._has_cancelled = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._before = self._task.cancelling()
        self._stream.notify_at_end(self._on_end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: object,
    ) -> None:
        self._stream.notify_at_end(None)
        if self._ended is None:
            return
        if not self._has_cancelled:
            self._ended.cancel()
            return
        assert self._task is not None
        if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise CommClosedError(f"{self._peer}: the peer has closed it") from error

    def _on_end(self) -> None:
        # not at once: the stream may end within the task itself
        self._ended = asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None
        self._has_cancelled = True
        self._task.cancel()


def _new_frame(size: int) -> memoryview:
    """Return memory of its own for a frame, to be freed by itself; it is not cleared first."""
    return np.empty(size, np.uint8).data


def _check_handshake(info: object) -> None:
    """Raise PeerError unless the peer speaks this version of the format."""
    if not isinstance(info, dict) or info.get(_WIRE) != wire.VERSION:
        raise PeerError(f"received no handshake of version {wire.VERSION} of the format of rows")
    nonce = info.get(_NONCE)
    if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
        raise PeerError(f"received a handshake without {NONCE_BYTES} bytes of {_NONCE}")
