"""Finds the order of a worker's devices by their links, and the CPUs near its own device that it
may use.

Every worker announces its CPUs to the others, and computes its own share: workers on one host whose
devices have the same CPUs near them divide these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from siirl_dask.context import Device, DeviceKind
from siirl_dask.devices import accelerator, traits_of
from siirl_dask.devices.accelerator import VisibleDevices
from siirl_dask.devices.cpus import SYSFS, count_cores, given_cpus, kernel, share_of
from siirl_dask.devices.topology import Topology, read_topology

logger = logging.getLogger("siirl_dask.worker")


def on_host(visible: VisibleDevices, root: Path = SYSFS) -> VisibleDevices:
    """Return the devices of this process with their order by links, and the CPUs near them."""
    if visible.kind is DeviceKind.CPU:
        return visible
    topology = topology_of(visible.kind, root)
    for fault in topology.faults:
        logger.warning("%s", fault)
    return with_topology(visible, topology)


def topology_of(kind: DeviceKind, root: Path = SYSFS) -> Topology:
    """Return the topology of the devices that this process sees, all of one kind."""
    return read_topology(accelerator.card_places(kind), traits_of(kind), root)


def with_topology(visible: VisibleDevices, topology: Topology) -> VisibleDevices:
    """Return the devices in the topology's order by links, with the CPUs of this process that
    are near them.
    """
    usable = given_cpus()
    near = tuple(cpus & usable for cpus in topology.near)
    return replace(visible, order=topology.order, near=near, host=kernel())


def share_of_worker(
    worker: str,
    visible_to: Mapping[str, VisibleDevices],
    devices: Mapping[str, Device],
    threads: int = 1,
    root: Path = SYSFS,
) -> frozenset[int]:
    """Return the CPUs of a worker: its share of those near its device; none where these are not
    known.

    Where a launcher has already divided the CPUs among the workers, each takes all of its own that
    are near.
    """
    near = _near(visible_to[worker], devices[worker])
    if not near:
        return frozenset()
    sharers = _sharers(worker, visible_to, devices)
    return share_of(near, sharers.index(worker), len(sharers), threads, root)


def cores_of_worker(
    worker: str,
    visible_to: Mapping[str, VisibleDevices],
    devices: Mapping[str, Device],
    neighbours: int = 1,
    root: Path = SYSFS,
) -> int:
    """Return how many cores a worker may use while all others use as many; at least 1.

    It is an equal part of those near its device; where these are not known, of all that its process
    may use, by ``neighbours``, the number of workers at its address. A container's quota is divided
    by that as well. To be called before the process is bound.
    """
    from siirl_dask.dask_internals import cpu_count  # topologies are read without Dask, too

    usable = given_cpus()
    near = _near(visible_to[worker], devices[worker])
    if near:
        cores = count_cores(near, root) // len(_sharers(worker, visible_to, devices))
    else:
        cores = count_cores(usable, root) // neighbours
    quota = cpu_count()
    if len(usable) > quota:  # a container's, which affinity does not show
        cores = min(cores, quota // neighbours)
    return max(1, cores)


def _sharers(
    worker: str, visible_to: Mapping[str, VisibleDevices], devices: Mapping[str, Device]
) -> list[str]:
    """Return the workers of one host that have the same CPUs near their devices, in the order of
    the run.
    """
    host = visible_to[worker].host
    near = _near(visible_to[worker], devices[worker])
    return [
        name
        for name in devices
        if visible_to[name].host == host and _near(visible_to[name], devices[name]) == near
    ]


def _near(visible: VisibleDevices, device: Device) -> frozenset[int]:
    if not visible.near or device.kind is DeviceKind.CPU:
        return frozenset()
    return visible.near[device.index]
