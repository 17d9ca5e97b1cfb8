"""Reports how the accelerators of this machine are linked, and which CPUs workers on them would
be bound to.
"""

from __future__ import annotations

from siirl_dask.config import Affinity, ClusterConfig
from siirl_dask.context import DeviceKind
from siirl_dask.devices import accelerator
from siirl_dask.devices.accelerator import VisibleDevices
from siirl_dask.devices.cpus import show_cpus
from siirl_dask.devices.topology import Topology
from siirl_dask.driver.doctor.finding import DoctorFinding, note, ok
from siirl_dask.estimates.worker_devices import assign_devices, describe_links, describe_nodes
from siirl_dask.worker.hardware.affinity import topology_of

_PART = "topology"


def check_topology(cluster: ClusterConfig) -> list[DoctorFinding]:
    """Return findings on NUMA nodes, links between accelerators and, for a run that starts here,
    each worker's CPUs.
    """
    visible = accelerator.visible_devices()
    nodes = ok("numa", describe_nodes())
    if visible.kind is DeviceKind.CPU:
        return [nodes]
    return [nodes, *judge_topology(visible, topology_of(visible.kind), cluster)]


def judge_topology(
    visible: VisibleDevices, topology: Topology, cluster: ClusterConfig
) -> list[DoctorFinding]:
    """Return findings on the links of devices, and on what is known of the CPUs near them."""
    findings = [ok(_PART, describe_links(topology, visible.kind))]
    findings += [
        note(_PART, fault, "run it by hand; without it links are those that sysfs tells")
        for fault in topology.faults
    ]
    if cluster.affinity is Affinity.none:
        return [*findings, ok("affinity", "cluster.affinity=none: workers are bound to no CPUs")]
    if not any(topology.near):
        text = "the system does not tell which CPUs are near them, and workers are bound to none"
        return [*findings, ok("affinity", text)]
    count = len(visible.cards) if cluster.exists or cluster.spec else cluster.workers
    names = [str(worker) for worker in range(count)]
    assigned = assign_devices(visible, topology, names, cluster.threads)
    workers = [
        f"{worker} on {device.torch_name} CPUs {show_cpus(device.cpus) or 'as given'}"
        for worker, device in assigned.devices.items()
    ]
    return [*findings, ok("affinity", f"workers of a run here: {', '.join(workers)}")]
