"""Describes this machine's topology, and the places that workers started here will take on it, as they will choose."""

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
from siirl_dask.planner import Plan
from siirl_dask.planner.explain.tables import table
from siirl_dask.planner.role_contract import groups_of
from siirl_dask.worker.affinity import share_of_worker, topology_of, with_topology
from siirl_dask.worker.devices import assign


@dataclass(frozen=True, slots=True)
class Places:
    """The devices and CPUs of the workers that a run starts on this machine."""

    topology: Topology
    devices: Mapping[str, Device]
    """Device of each worker, with its CPUs."""


def find_places(cluster: ClusterConfig, workers: Sequence[str]) -> Places | None:
    """Return the places of workers on this machine; None where they compute on CPUs, or elsewhere, or anywhere."""
    if cluster.exists or cluster.spec or cluster.device is DevicePreference.cpu or cluster.affinity is Affinity.none:
        return None
    visible = visible_devices()
    if visible.kind is DeviceKind.CPU:
        return None
    return places_on(visible, topology_of(visible.kind), workers, cluster.threads)


def places_on(visible: VisibleDevices, topology: Topology, workers: Sequence[str], threads: int = 1) -> Places:
    """Return the places that ``workers`` take which all see the devices ``visible``."""
    visible_to = dict.fromkeys(workers, with_topology(visible, topology))
    devices = assign(visible_to)
    shares = {worker: share_of_worker(worker, visible_to, devices, threads) for worker in workers}
    return Places(topology, {worker: replace(one, cpus=shares[worker]) for worker, one in devices.items()})


def describe_nodes() -> str:
    """Return the NUMA nodes of this machine and the CPUs that this process may use."""
    nodes = numa_nodes()
    told = "; ".join(f"node {node} has CPUs {show_cpus(cpus) or 'none'}" for node, cpus in nodes.items())
    given = show_cpus(given_cpus())
    return f"{told or 'the system tells of no nodes'}; this process may use {given or 'any'}"


def describe_links(topology: Topology, kind: DeviceKind) -> str:
    """Return which devices have the fastest links, and the kinds of all others."""
    if len(topology.order) < 2:
        return f"{kind}:0 is alone"
    blocks = blocks_of(topology)
    within = slowest_link(topology.links, max(blocks, key=len)) or "not known"
    if len(blocks) == 1:
        return f"{within} between each two of {_names(blocks[0], kind)}"
    across = {
        topology.links[one][two] or "not known"
        for first, second in combinations(blocks, 2)
        for one in first
        for two in second
    }
    between = ", ".join(sorted(across, key=speed_of, reverse=True))
    if max(map(len, blocks)) == 1:
        return f"{between} between {_names(topology.order, kind)}"
    return f"{within} within {' and within '.join(_names(block, kind) for block in blocks)}; {between} between these"


def describe_places(places: Places, plan: Plan) -> str:
    """Return a plan's section on the topology: each worker's device, NUMA node and CPUs, and the links of groups."""
    rows = [
        (worker, one.torch_name, "?" if (node := _node(places, one)) is None else str(node), show_cpus(one.cpus) or "-")
        for worker, one in places.devices.items()
    ]
    kind = next(iter(places.devices.values())).kind
    lines = [
        f"Links: {describe_links(places.topology, kind)}",
        table(("worker", "device", "NUMA node", "CPUs that it is bound to"), rows),
        *(f"role {role!r}, {key}={size}: {link}" for role, key, size, link in group_links(places, plan)),
        *(f"note: {fault}" for fault in places.topology.faults),
    ]
    return "\n".join(lines)


def group_links(places: Places, plan: Plan) -> Iterator[tuple[str, str, int, str]]:
    """Yield role, config key, size, and the slowest link of each kind of groups that a role's ranks form."""
    for role in plan.dag.roles:
        workers = plan.placement[role.name]
        for key, size in groups_of(role.build, len(workers)).items():
            groups = [workers[first : first + size] for first in range(0, len(workers), size)]
            cards = [sorted({places.devices[worker].index for worker in group}) for group in groups]
            slowest = [slowest_link(places.topology.links, those) for those in cards if len(those) > 1]
            link = min(slowest, key=speed_of) or "not known" if slowest else "on one device"
            yield role.name, key, size, link


def places_as_data(places: Places, plan: Plan) -> dict[str, Any]:
    """Return the same as plain data."""
    return {
        "links": [list(row) for row in places.topology.links],
        "workers": {
            worker: {"device": one.torch_name, "node": _node(places, one), "cpus": show_cpus(one.cpus)}
            for worker, one in places.devices.items()
        },
        "groups": [
            {"role": role, "key": key, "size": size, "slowest": link}
            for role, key, size, link in group_links(places, plan)
        ],
        "faults": list(places.topology.faults),
    }


def _node(places: Places, device: Device) -> int | None:
    return places.topology.nodes[device.index]


def _names(cards: Sequence[int], kind: DeviceKind) -> str:
    return f"{kind}:{','.join(map(str, cards))}"
