"""The transport over Dask's own comms (tcp, tls, ucxx: whatever the cluster speaks), worker to worker.

A WorkerPlugin registers the handler; neither the scheduler nor the client sees a byte of it. Replies are frames of raw
buffers, and a connection of our own never deserialises what arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.comm.core import CommClosedError
from distributed.core import ConnectionPool
from distributed.protocol.serialize import Serialized

from siirl_dask.coordinator.messages import Handler, Reply, Request, TransitionKey
from siirl_dask.errors import Aborted, PeerError, SiirlError

if TYPE_CHECKING:
    from distributed import Worker


def _op(run: str) -> str:
    return f"siirl_request_{run}"


class DaskTransport:
    """Requests to the members of one run, by worker name. ``members`` is {name: address}, fixed for the run."""

    def __init__(self, worker: Worker, members: Mapping[str, str], stall_timeout: float) -> None:
        self._members = members
        self._stall_timeout = stall_timeout
        self._pool = ConnectionPool(
            deserialize=False, connection_args=worker.connection_args, timeout=min(stall_timeout, 30.0)
        )

    async def start(self) -> None:
        await self._pool.start()

    async def request(self, worker: str, request: Request) -> Reply:
        message = {
            "op": _op(request.key.run),
            "kind": request.op,
            "sequence": request.key.sequence,
            "edge": request.key.edge,
            "rows": list(request.rows),
        }
        where = f"edge {request.key.edge}, {request.op} from worker {worker!r} at {self._members[worker]}"
        try:
            async with asyncio.timeout(self._stall_timeout):
                answer = await self._send(self._members[worker], message)
        except TimeoutError as error:
            raise PeerError(f"{where}: no answer within {self._stall_timeout:g} s") from error
        except OSError as error:  # CommClosedError is one
            raise PeerError(f"{where}: the peer is gone ({error})") from error
        if not isinstance(answer, dict) or "header" not in answer:
            text = answer.get("refused") if isinstance(answer, dict) else None
            raise PeerError(f"{where}: {text or 'an answer that is none'}")
        payload = answer["payload"]
        if not isinstance(payload, Serialized):
            raise PeerError(f"{where}: a payload that is not plain frames")
        return Reply(answer["header"], payload.frames)

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

    async def close(self) -> None:
        await self._pool.close()


def serve(worker: Worker, run: str, handler: Handler) -> None:
    """Answer peers' requests of one run on this worker with ``handler``."""

    async def siirl_request(kind: str, sequence: int, edge: str, rows: tuple[int, ...]) -> dict[str, Any]:
        try:
            reply = await handler(Request(kind, TransitionKey(run, sequence, edge), rows))
        except Aborted as error:
            raise CommClosedError(str(error)) from error  # closes this connection: the peer is being aborted as well
        except SiirlError as error:
            return {"refused": str(error)}
        return {"header": reply.header, "payload": Serialized({}, list(reply.frames))}

    worker.handlers[_op(run)] = siirl_request


def stop_serving(worker: Worker, run: str) -> None:
    worker.handlers.pop(_op(run), None)
