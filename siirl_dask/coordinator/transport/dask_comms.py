"""Carries requests over Dask's own comms (tcp, tls, ucxx: whatever the cluster speaks), worker to worker.

A WorkerPlugin registers the handler; neither the scheduler nor the client sees a byte of it. Replies are frames of raw
buffers, and connections of this pool do not deserialise what arrives: it is checked as plain data first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.comm.core import CommClosedError
from distributed.core import ConnectionPool
from distributed.protocol.serialize import Serialized

from siirl_dask.coordinator.transport.messages import Handler, Reply, Request, read_request
from siirl_dask.errors import Aborted, PeerError, SiirlError

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.comm.core import Comm


def _op(run: str) -> str:
    return f"siirl_request_{run}"


class DaskComms:
    """Carries requests to any member of the run. Belongs to the event loop.

    ``members`` is {name: address}; ``timeout`` is the seconds that a connection may take to open.
    """

    def __init__(self, worker: Worker, run: str, members: Mapping[str, str], timeout: float) -> None:
        self._op = _op(run)
        self._members = members
        self._pool = ConnectionPool(deserialize=False, connection_args=worker.connection_args, timeout=timeout)

    async def start(self) -> None:
        await self._pool.start()

    async def reaches(self, worker: str) -> bool:
        return worker in self._members

    async def ask(self, worker: str, request: Request) -> Reply:
        answer = await self._send(self._members[worker], {"op": self._op, "request": request.pack()})
        if not isinstance(answer, dict) or not isinstance(answer.get("header"), dict):
            refused = answer.get("refused") if isinstance(answer, dict) else None
            raise PeerError(str(refused or "an answer that is none"))
        payload = answer.get("payload")
        if not isinstance(payload, Serialized):
            raise PeerError("a payload that is not plain frames")
        return Reply(answer["header"], payload.frames)

    async def close(self) -> None:
        await self._pool.close()

    async def _send(self, address: str, message: dict[str, Any]) -> Any:
        comm = await self._pool.connect(address)
        comm.allow_offload = False  # there is nothing to serialise, and finding that out takes longer than to send it
        try:
            await comm.write(message)
            answer = await comm.read()
        except BaseException:
            comm.abort()  # a reply may still be on its way: this connection cannot be used again
            raise
        finally:
            self._pool.reuse(address, comm)
        return answer


def serve(worker: Worker, run: str, handler: Handler) -> None:
    """Answer the requests that peers of one run send to this worker with ``handler``."""

    async def siirl_request(comm: Comm, request: object = None) -> dict[str, Any]:
        comm.allow_offload = False
        try:
            reply = await handler(read_request(run, request))
        except Aborted as error:
            raise CommClosedError(str(error)) from error  # closes this connection: the peer is being aborted as well
        except SiirlError as error:
            return {"refused": str(error)}
        return {"header": reply.header, "payload": Serialized({}, list(reply.frames))}

    worker.handlers[_op(run)] = siirl_request


def stop_serving(worker: Worker, run: str) -> None:
    worker.handlers.pop(_op(run), None)
