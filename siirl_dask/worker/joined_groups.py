"""Joins a worker to the process groups of its run, on the device that it finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from distributed.comm.addressing import get_address_host

from siirl_dask.config import Affinity
from siirl_dask.context import Device, Rank
from siirl_dask.coordinator.transport.messages import Transport
from siirl_dask.devices.cpus import CpuBinding
from siirl_dask.planner import Plan
from siirl_dask.worker import process_groups as groups
from siirl_dask.worker import stuck_collectives
from siirl_dask.worker.device_shares import share_devices
from siirl_dask.worker.devices import find_devices
from siirl_dask.worker.group_store import GroupStore
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.stop import StopFlag
from siirl_dask.worker.weight_broadcast import Broadcast, join_broadcasts


@dataclass(frozen=True, slots=True)
class JoinedGroups:
    """A worker's place among the workers of its run."""

    device: Device
    ranks: dict[str, Rank]
    """Its rank in each of its roles."""
    broadcasts: dict[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """Broadcasts of the run, by their members."""
    polls: frozenset[int] = frozenset()
    """Descriptors of the groups' connections: see ``stuck_collectives``."""


def join_groups(
    spec: RunSpec,
    worker: str,
    plan: Plan,
    store: GroupStore,
    transport: Transport,
    stop: StopFlag,
    binding: CpuBinding,
) -> JoinedGroups:
    """Find the devices of all workers, and join ``worker`` to the groups of its roles; all workers call it at once.

    ``binding`` binds the worker's process to CPUs near its device, where the run asks for that.
    """
    workers, timeout = list(spec.members), groups.longest_wait(spec.data.stall_timeout)
    host = get_address_host(spec.members[worker])
    joined = store.join(transport, host, timeout, stop) if len(workers) > 1 else None
    near = binding if spec.affinity is Affinity.auto else None
    neighbours = sum(get_address_host(address) == host for address in spec.members.values())
    devices = find_devices(
        worker,
        workers,
        joined,
        timeout,
        stop,
        cpu=spec.cpu,
        binding=near,
        threads=spec.threads,
        neighbours=neighbours,
    )
    devices = share_devices(devices, plan.placement, spec.footprints, spec.device_memory)
    if joined is None:
        return JoinedGroups(devices[worker], groups.single_ranks(plan.placement))
    before = stuck_collectives.polls()
    ranks = groups.join(joined, spec.run, worker, devices, plan.placement, host, timeout)
    polls = frozenset(stuck_collectives.polls() - before)
    broadcasts = join_broadcasts(worker, plan, devices, spec.data, timeout, stop)
    return JoinedGroups(devices[worker], ranks, broadcasts, polls)
