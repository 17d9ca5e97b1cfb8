"""Describes this machine's topology, and the devices and CPUs that workers started here will
use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from siirl_dask.config import Affinity, ClusterConfig, DevicePreference
from siirl_dask.context import Device, DeviceKind
from siirl_dask.devices.accelerator import VisibleDevices, visible_devices
from siirl_dask.devices.cpus import given_cpus, numa_nodes, show_cpus
from siirl_dask.devices.link_matrix import speed_of
from siirl_dask.devices.topology import Topology, blocks_of, slowest_link
from siirl_dask.planner import Plan, groups_of
from siirl_dask.wording import table
from siirl_dask.worker.hardware.affinity import share_of_worker, topology_of, with_topology
from siirl_dask.worker.hardware.devices import assign


@dataclass(frozen=True, slots=True)
class WorkerDevices:
    """The devices and CPUs of the workers that a run starts on this machine."""

    topology: Topology
    devices: Mapping[str, Device]
    """Device of each worker, with its CPUs."""


def find_worker_devices(cluster: ClusterConfig, workers: Sequence[str]) -> WorkerDevices | None:
    """Return the devices and CPUs of workers on this machine.

    None where workers compute on CPUs, are on other machines, or are bound to nothing.
    """
    if (
        cluster.exists
        or cluster.spec
        or cluster.device is DevicePreference.cpu
        or cluster.affinity is Affinity.none
    ):
        return None
    visible = visible_devices()
    if visible.kind is DeviceKind.CPU:
        return None
    return assign_devices(visible, topology_of(visible.kind), workers, cluster.threads)


def assign_devices(
    visible: VisibleDevices,
    topology: Topology,
    workers: Sequence[str],
    threads: int = 1,
) -> WorkerDevices:
    """Return the devices and CPUs that ``workers`` choose which all see the devices ``visible``."""
    visible_to = dict.fromkeys(workers, with_topology(visible, topology))
    devices = assign(visible_to)
    cpus = {worker: share_of_worker(worker, visible_to, devices, threads) for worker in workers}
    return WorkerDevices(
        topology, {worker: replace(device, cpus=cpus[worker]) for worker, device in devices.items()}
    )


def describe_nodes() -> str:
    """Return the NUMA nodes of this machine and the CPUs that this process may use."""
    nodes = "; ".join(
        f"node {node} has CPUs {show_cpus(cpus) or 'none'}" for node, cpus in numa_nodes().items()
    )
    allowed = show_cpus(given_cpus())
    return f"{nodes or 'the system tells of no nodes'}; this process may use {allowed or 'any'}"


def describe_links(topology: Topology, kind: DeviceKind) -> str:
    """Return which devices have the fastest links, and the kinds of all others."""
    if len(topology.order) < 2:
        return f"{kind}:0 is alone"
    blocks = blocks_of(topology)
    within = slowest_link(topology.links, max(blocks, key=len))
    if not within:
        within = "not known"
    if len(blocks) == 1:
        return f"{within} between each two of {_names(blocks[0], kind)}"
    across: set[str] = set()
    for first, second in combinations(blocks, 2):
        across.update(topology.links[one][two] or "not known" for one in first for two in second)
    between = ", ".join(sorted(across, key=speed_of, reverse=True))
    if max(map(len, blocks)) == 1:
        return f"{between} between {_names(topology.order, kind)}"
    return (
        f"{within} within {' and within '.join(_names(block, kind) for block in blocks)}; "
        f"{between} between these"
    )


def describe_worker_devices(devices: WorkerDevices, plan: Plan) -> str:
    """Return a plan's section on the topology: each worker's device, NUMA node and CPUs, and the
    links of groups.
    """
    rows = []
    for worker, device in devices.devices.items():
        node = _numa_node(devices, device)
        rows.append(
            (
                worker,
                device.torch_name,
                "?" if node is None else str(node),
                show_cpus(device.cpus) or "-",
            )
        )
    kind = next(iter(devices.devices.values())).kind
    lines = [
        f"Links: {describe_links(devices.topology, kind)}",
        table(("worker", "device", "NUMA node", "CPUs that it is bound to"), rows),
        *(
            f"role {role!r}, {key}={size}: {link}"
            for role, key, size, link in group_links(devices, plan)
        ),
        *(f"note: {fault}" for fault in devices.topology.faults),
    ]
    return "\n".join(lines)


def group_links(devices: WorkerDevices, plan: Plan) -> Iterator[tuple[str, str, int, str]]:
    """Yield role, config key, size, and the slowest link of each kind of groups that a role's
    ranks form.
    """
    for role in plan.dag.roles:
        workers = plan.placement[role.name]
        for key, size in groups_of(role.build, len(workers)).items():
            links = []
            for first in range(0, len(workers), size):
                cards = sorted(
                    {devices.devices[worker].index for worker in workers[first : first + size]}
                )
                if len(cards) > 1:
                    links.append(slowest_link(devices.topology.links, cards))
            if not links:
                yield role.name, key, size, "on one device"
                continue
            slowest = min(links, key=speed_of)
            yield role.name, key, size, slowest if slowest else "not known"


def worker_devices_as_data(devices: WorkerDevices, plan: Plan) -> dict[str, Any]:
    """Return the same as plain data."""
    workers = {}
    for worker, device in devices.devices.items():
        workers[worker] = {
            "device": device.torch_name,
            "node": _numa_node(devices, device),
            "cpus": show_cpus(device.cpus),
        }
    return {
        "links": [list(row) for row in devices.topology.links],
        "workers": workers,
        "groups": [
            {"role": role, "key": key, "size": size, "slowest": link}
            for role, key, size, link in group_links(devices, plan)
        ],
        "faults": list(devices.topology.faults),
    }


def _numa_node(devices: WorkerDevices, device: Device) -> int | None:
    return devices.topology.nodes[device.index]


def _names(cards: Sequence[int], kind: DeviceKind) -> str:
    return f"{kind}:{','.join(map(str, cards))}"
