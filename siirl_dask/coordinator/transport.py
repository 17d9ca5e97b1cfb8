"""The transport over Dask's own comms (tcp, tls, ucxx: whatever the cluster speaks), worker to worker.

A WorkerPlugin registers the handlers; neither the scheduler nor the client sees a byte of it. Replies are frames of raw
buffers, and a connection of our own never deserialises what arrives. While an answer is out, the peer is asked for a
sign of life: one that is dead or stands still is told from one that is busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.comm.core import CommClosedError
from distributed.core import ConnectionPool
from distributed.protocol.serialize import Serialized

from siirl_dask.coordinator.messages import Handler, Reply, Request, TransitionKey
from siirl_dask.errors import Aborted, PeerError, SiirlError

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("siirl_dask.coordinator")
_ROUND = 0.2  # of the peer timeout: how often peers that owe an answer are asked for a sign of life
_SILENCE = 0.7  # of the peer timeout: how long that sign may take; the rest is for the word to go round


def _op(run: str) -> str:
    return f"siirl_request_{run}"


def _ping(run: str) -> str:
    return f"siirl_ping_{run}"


class DaskTransport:
    """Requests to the members of one run, by worker name.

    Args:
        members: {name: address}, fixed for the run.
        peer_timeout: Seconds within which a peer that is dead or stands still is noticed.
        stall_timeout: Seconds that a peer which is alive may take to answer.
    """

    def __init__(
        self, worker: Worker, run: str, members: Mapping[str, str], peer_timeout: float, stall_timeout: float
    ) -> None:
        self._run = run
        self._members = members
        self._peer_timeout = peer_timeout
        self._stall_timeout = stall_timeout
        self._pool = ConnectionPool(deserialize=False, connection_args=worker.connection_args, timeout=peer_timeout)
        self._owed: dict[str, set[asyncio.Timeout]] = {}
        self._silent: set[asyncio.Timeout] = set()
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._rounds: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._pool.start()
        self._rounds = asyncio.create_task(self._go_round())

    async def request(self, worker: str, request: Request) -> Reply:
        address = self._members[worker]
        where = f"edge {request.key.edge}, {request.op} from worker {worker!r} at {address}"
        message = {
            "op": _op(self._run),
            "kind": str(request.op),
            "sequence": request.key.sequence,
            "edge": request.key.edge,
            "body": dict(request.body),
        }
        waiting = asyncio.timeout(self._stall_timeout)
        owed = self._owed.setdefault(worker, set())
        owed.add(waiting)
        try:
            async with waiting:
                answer = await self._send(address, message)
        except TimeoutError as error:
            if waiting in self._silent:
                raise PeerError(
                    f"{where}: no sign of life within {self._peer_timeout:g} s (cluster.peer_timeout): "
                    "it stands still, is cut off, or code that it runs holds the interpreter's lock for so long"
                ) from error
            raise PeerError(f"{where}: no answer within {self._stall_timeout:g} s (cluster.stall_timeout)") from error
        except OSError as error:  # CommClosedError is one
            raise PeerError(f"{where}: the peer is gone ({error})") from error
        finally:
            owed.discard(waiting)
            self._silent.discard(waiting)
        return _read(answer, where)

    async def close(self) -> None:
        for task in (self._rounds, *self._asked.values()):
            if task is not None:
                task.cancel()
        await self._pool.close()

    async def _go_round(self) -> None:
        """Every so often ask each peer that owes an answer for a sign of life."""
        while True:
            await asyncio.sleep(_ROUND * self._peer_timeout)
            self._asked = {worker: task for worker, task in self._asked.items() if not task.done()}
            for worker, owed in self._owed.items():
                if owed and worker not in self._asked:
                    self._asked[worker] = asyncio.create_task(self._ask_for_sign(worker))

    async def _ask_for_sign(self, worker: str) -> None:
        """End every wait for a peer that gives none. In slices: a while in which this process stood still is one."""
        slices = 5
        ping = asyncio.create_task(self._send(self._members[worker], {"op": _ping(self._run)}))
        try:
            for _ in range(slices):
                done, _ = await asyncio.wait({ping}, timeout=_SILENCE * self._peer_timeout / slices)
                if done and ping.exception() is None:
                    return
        finally:
            ping.cancel()
        for waiting in self._owed[worker]:
            self._silent.add(waiting)
            waiting.reschedule(asyncio.get_running_loop().time())

    async def _send(self, address: str, message: dict[str, Any]) -> Any:
        comm = await self._pool.connect(address)
        try:
            await comm.write(message)
            answer = await comm.read()
        except BaseException:
            comm.abort()  # a reply may still be on its way: this connection cannot be used again
            raise
        finally:
            self._pool.reuse(address, comm)
        return answer


def _read(answer: object, where: str) -> Reply:
    if not isinstance(answer, dict) or not isinstance(answer.get("header"), dict):
        text = answer.get("refused") if isinstance(answer, dict) else None
        raise PeerError(f"{where}: {text or 'an answer that is none'}")
    payload = answer.get("payload")
    if not isinstance(payload, Serialized):
        raise PeerError(f"{where}: a payload that is not plain frames")
    return Reply(answer["header"], payload.frames)


def serve(worker: Worker, run: str, handler: Handler) -> None:
    """Answer peers' requests of one run on this worker with ``handler``. What it refuses is logged."""

    async def siirl_request(
        kind: object = None, sequence: object = None, edge: object = None, body: object = None
    ) -> dict[str, Any]:
        try:
            reply = await handler(_request(run, kind, sequence, edge, body))
        except Aborted as error:
            raise CommClosedError(str(error)) from error  # closes this connection: the peer is being aborted as well
        except SiirlError as error:
            logger.warning("refused a request of run %s: %s", run, error)
            return {"refused": str(error)}
        return {"header": reply.header, "payload": Serialized({}, list(reply.frames))}

    async def siirl_ping() -> dict[str, Any]:
        return {"header": {}}

    worker.handlers[_op(run)] = siirl_request
    worker.handlers[_ping(run)] = siirl_ping


def _request(run: str, kind: object, sequence: object, edge: object, body: object) -> Request:
    """PeerError for what is no request."""
    if not (isinstance(kind, str) and isinstance(sequence, int) and isinstance(edge, str) and isinstance(body, dict)):
        raise PeerError(f"received what is no request: {str((kind, sequence, edge))[:120]}")
    return Request(kind, TransitionKey(run, sequence, edge), body)


def stop_serving(worker: Worker, run: str) -> None:
    for name in (_op(run), _ping(run)):
        worker.handlers.pop(name, None)
