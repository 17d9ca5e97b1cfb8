"""Says which devices of a worker have fast links, and which CPUs near its own device it may use.

Every worker tells the others what it may use, and takes its share by itself: workers on one host whose devices have the
same CPUs near them divide these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from siirl_dask.context import Device, DeviceKind
from siirl_dask.devices import accelerator, traits_of
from siirl_dask.devices.accelerator import VisibleDevices
from siirl_dask.devices.cpus import SYSFS, given_cpus, kernel, share_of
from siirl_dask.devices.topology import Topology, read_topology

logger = logging.getLogger("siirl_dask.worker")


def on_host(visible: VisibleDevices, root: Path = SYSFS) -> VisibleDevices:
    """Return the devices of this process with their order by links, and the CPUs near them."""
    if visible.kind is DeviceKind.CPU:
        return visible
    topology = topology_of(visible.kind, root)
    for fault in topology.faults:
        logger.warning("%s", fault)
    return placed(visible, topology)


def topology_of(kind: DeviceKind, root: Path = SYSFS) -> Topology:
    """Return the topology of the devices that this process sees, all of one kind."""
    return read_topology(accelerator.card_places(kind), traits_of(kind), root)


def placed(visible: VisibleDevices, topology: Topology) -> VisibleDevices:
    """Return devices with what a topology says of them, and the CPUs of this process."""
    given = given_cpus()
    near = tuple(cpus & given for cpus in topology.near)
    return replace(visible, order=topology.order, near=near, host=kernel())


def share_of_worker(
    worker: str,
    visible_to: Mapping[str, VisibleDevices],
    devices: Mapping[str, Device],
    threads: int = 1,
    root: Path = SYSFS,
) -> frozenset[int]:
    """Return the CPUs of a worker: its share of those near its device; none where these are not known.

    Workers that were given other CPUs by a launcher keep those apart: each takes all of its own that are near.
    """
    near = {name: _near(visible_to[name], devices[name]) for name in devices}
    if not near[worker]:
        return frozenset()
    host = visible_to[worker].host
    beside = [name for name in devices if visible_to[name].host == host and near[name] == near[worker]]
    return share_of(near[worker], beside.index(worker), len(beside), threads, root)


def _near(visible: VisibleDevices, device: Device) -> frozenset[int]:
    return visible.near[device.index] if visible.near and device.kind is not DeviceKind.CPU else frozenset()
