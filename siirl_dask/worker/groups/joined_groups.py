"""Joins a worker to the process groups of its run, on the device that it finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from distributed.comm.addressing import get_address_host

from siirl_dask.config import Affinity
from siirl_dask.context import Device, Rank
from siirl_dask.coordinator.transport.messages import Transport
from siirl_dask.devices.cpus import CpuBinding
from siirl_dask.planner import Plan
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.groups import stuck_collectives
from siirl_dask.worker.groups.group_store import GroupStore
from siirl_dask.worker.hardware.device_shares import share_devices
from siirl_dask.worker.hardware.devices import find_devices
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.stop import StopFlag
from siirl_dask.worker.weight_broadcast import Broadcast, join_broadcasts


@dataclass(frozen=True, slots=True)
class JoinedGroups:
    """A worker's device, ranks and connections to the other workers of its run."""

    device: Device
    ranks: dict[str, Rank]
    """Its rank in each of its roles."""
    broadcasts: dict[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """Broadcasts of the run, by their members."""
    epoll_descriptors: frozenset[int] = frozenset()
    """File descriptors that watch the groups' connections: see ``stuck_collectives``."""


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
    before = stuck_collectives.epoll_descriptors()
    ranks = groups.join(
        torch_store,
        run=spec.run,
        worker=worker,
        devices=devices,
        roles=plan.placement,
        host=host,
        timeout=timeout,
    )
    epoll_descriptors = frozenset(stuck_collectives.epoll_descriptors() - before)
    broadcasts = join_broadcasts(worker, plan, devices, data=spec.data, timeout=timeout, stop=stop)
    return JoinedGroups(devices[worker], ranks, broadcasts, epoll_descriptors)
