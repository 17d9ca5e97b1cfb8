"""Joins a worker to the process groups of its run, on the device that it finds, through a store that
the first worker hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.comm.addressing import get_address_host

from siirl_dask import collectives
from siirl_dask.config import Affinity
from siirl_dask.context import Device, Rank
from siirl_dask.coordinator.transport.messages import Op, Reply, Request, TransitionKey, Transport
from siirl_dask.devices.cpus import CpuBinding
from siirl_dask.errors import PeerError
from siirl_dask.planner import Plan
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.hardware.device_shares import share_devices
from siirl_dask.worker.hardware.devices import find_devices
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.stop import StopFlag, wait_for
from siirl_dask.worker.weight_broadcast import Broadcast, join_broadcasts


class GroupStore:
    """Hosts the store on the first of the run's workers, and requests its port from that worker
    on all others.
    """

    def __init__(
        self,
        run: str,
        worker: str,
        members: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
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
            store, port = collectives.host_store(host, timeout)
            self._loop.call_soon_threadsafe(self._port.set_result, port)
            return store
        port = wait_for(self._request_port(transport, first), self._loop, stop)
        return collectives.join_store(get_address_host(self._members[first]), port, timeout)

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


@dataclass(frozen=True, slots=True)
class JoinedGroups:
    """A worker's device, ranks and connections to the other workers of its run."""

    device: Device
    ranks: dict[str, Rank]
    """Its rank in each of its roles."""
    broadcasts: dict[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """Broadcasts of the run, by their members."""


def join_groups(
    spec: RunSpec,
    worker: str,
    plan: Plan,
    store: GroupStore,
    transport: Transport,
    stop: StopFlag,
    binding: CpuBinding,
) -> JoinedGroups:
    """Find the devices of all workers, and join ``worker`` to the groups of its roles; all workers
    call it together.

    ``binding`` binds the worker's process to CPUs near its device, where ``cluster.affinity``
    allows that.
    """
    workers = list(spec.members)
    timeout = groups.longest_wait(spec.data.stall_timeout)
    host = get_address_host(spec.members[worker])
    torch_store = store.join(transport, host, timeout, stop) if len(workers) > 1 else None
    devices = find_devices(
        worker,
        workers,
        torch_store,
        timeout=timeout,
        stop=stop,
        cpu=spec.cpu,
        binding=binding if spec.affinity is Affinity.auto else None,
        threads=spec.threads,
        neighbours=sum(get_address_host(address) == host for address in spec.members.values()),
    )
    devices = share_devices(devices, plan.placement, spec.footprints, spec.device_memory)
    if torch_store is None:
        return JoinedGroups(devices[worker], groups.single_ranks(plan.placement))
    ranks = groups.join(
        torch_store,
        run=spec.run,
        worker=worker,
        devices=devices,
        roles=plan.placement,
        host=host,
        timeout=timeout,
    )
    broadcasts = join_broadcasts(worker, plan, devices, data=spec.data, timeout=timeout, stop=stop)
    return JoinedGroups(devices[worker], ranks, broadcasts)
