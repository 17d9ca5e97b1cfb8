"""Which device a worker process computes on."""

from __future__ import annotations

import torch

from siirl_dask.context import Device, DeviceKind


def find_device(worker: str, slot: int) -> Device:
    """The accelerator number ``slot`` of this machine, counted round; the CPU where there is none."""
    kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.NPU if _npu() else DeviceKind.CPU
    if kind is DeviceKind.CPU:
        return Device(worker)
    module = torch.get_device_module(str(kind))
    device = Device(worker, kind, slot % module.device_count())
    module.set_device(device.index)
    return device


def _npu() -> bool:
    return hasattr(torch, "npu") and torch.npu.is_available()
