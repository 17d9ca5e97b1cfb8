"""The devices that these tests run on: GPUs or NPUs, or with ``SIIRL_TEST_DEVICE=cpu`` as many
CPUs as a test wants.
"""

import os
from functools import cache

import torch

from siirl_dask.context import Device, DeviceKind
from siirl_dask.devices.accelerator import VisibleDevices, visible_devices
from siirl_dask.testing.ranks import devices_of

ON_CPU = os.environ.get("SIIRL_TEST_DEVICE") == "cpu"
MANY = 8


@cache
def visible() -> VisibleDevices:
    return VisibleDevices() if ON_CPU else visible_devices()


def kind() -> DeviceKind:
    return visible().kind


def count() -> int:
    """The number of devices; CPUs are shared by as many workers as a test asks for."""
    return MANY if ON_CPU else len(visible().cards)


def device(rank=None) -> Device:
    """The device of a worker that is alone in this process, or that of a rank in the process of
    the rank.
    """
    if rank is None or rank.size == 1:
        return devices_of(1, kind())["w0"]
    return devices_of(rank.size, kind())[f"w{rank.rank}"]


def memory() -> tuple[int, int]:
    """Bytes that are in use on the device by any process, and this process's peak; zeros on a
    CPU.
    """
    if kind() is DeviceKind.CPU:
        return 0, 0
    module = torch.get_device_module(str(kind()))
    free, total = module.mem_get_info()
    return total - free, module.max_memory_allocated()


def finish() -> None:
    """Wait until the device has done what was asked of it, before a clock is read."""
    if kind() is not DeviceKind.CPU:
        torch.get_device_module(str(kind())).synchronize()
