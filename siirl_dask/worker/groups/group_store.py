"""The store through which the workers of a run find each other in torch.distributed; the first
worker hosts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from distributed.comm.addressing import get_address_host

from siirl_dask.coordinator.transport.messages import Op, Reply, Request, TransitionKey, Transport
from siirl_dask.errors import PeerError
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.stop import StopFlag, wait_for


class GroupStore:
    """Hosts the store on the first of the run's workers, and requests its port from that worker
    on all others.
    """

    def __init__(
        self, run: str, worker: str, members: Mapping[str, str], loop: asyncio.AbstractEventLoop
    ) -> None:
        """``members`` are the addresses of the run's workers by name, in rank order."""
        self._run = run
        self._worker = worker
        self._members = members
        self._loop = loop
        self._port: asyncio.Future[int] = loop.create_future()

    def join(self, transport: Transport, host: str, timeout: float, stop: StopFlag) -> Any:
        """Return the store, or a client of it; ``host`` is this worker's own. PeerError for an
        invalid port.
        """
        first = next(iter(self._members))
        if first == self._worker:
            store, port = groups.host_store(host, timeout)
            self._loop.call_soon_threadsafe(self._port.set_result, port)
            return store
        port = wait_for(self._request_port(transport, first), self._loop, stop)
        return groups.join_store(get_address_host(self._members[first]), port, timeout)

    async def answer(self) -> Reply:
        """Reply to a peer with the store's port, once there is one."""
        return Reply({"port": await asyncio.shield(self._port)})

    async def _request_port(self, transport: Transport, first: str) -> int:
        reply = await transport.request(
            first, Request(Op.STORE, TransitionKey(self._run, -1, "store"))
        )
        port = reply.header.get("port")
        if not isinstance(port, int) or not 0 < port < 65536:
            raise PeerError(
                f"worker {first!r} gave {port!r} as the port of the process group's store"
            )
        return port
