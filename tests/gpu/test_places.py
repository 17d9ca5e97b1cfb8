"""A device's links, NUMA node and CPUs, as the driver, the system and the maker's program tell
them on a real host.
"""

import pytest

from siirl_dask.context import DeviceKind
from siirl_dask.devices.cpus import CpuBinding, given_cpus, show_cpus
from siirl_dask.estimates.worker_devices import describe_links, describe_nodes
from siirl_dask.worker.hardware.affinity import topology_of
from siirl_dask.worker.hardware.devices import find_devices
from siirl_dask.worker.stop import StopFlag
from tests.gpu import devices

pytestmark = pytest.mark.gpu


def test_a_process_is_bound_near_its_device_and_let_go(tell):
    before, binding = given_cpus(), CpuBinding()
    cpu = devices.kind() is DeviceKind.CPU
    (device,) = find_devices("w0", ["w0"], None, 1, StopFlag(), cpu=cpu, binding=binding).values()
    bound = given_cpus()
    binding.undo()
    assert given_cpus() == before
    if cpu:
        assert bound == before
        return
    topology = topology_of(devices.kind())
    tell(
        f"{describe_nodes()}; {describe_links(topology, devices.kind())}; bound to "
        f"{show_cpus(bound)}"
    )
    assert not topology.faults
    assert sorted(topology.order) == list(range(devices.count()))
    assert bound == (device.cpus or before)
    assert device.cpus <= topology.near[device.index] & before
