"""Number types of models: torch's name for one, and what ``auto`` stands for on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from siirl_dask.config import Dtype
from siirl_dask.context import DeviceKind

if TYPE_CHECKING:
    import torch


def dtype_on(dtype: Dtype, kind: DeviceKind, index: int) -> Dtype:
    """Return ``dtype``, and for ``auto`` bfloat16 on an accelerator that computes in it, else
    float32.

    That is for models outside of runs: a run decides once for all its workers
    (driver/checks/number_type.py).
    """
    if dtype is not Dtype.auto:
        return dtype
    if kind is DeviceKind.CPU:
        return Dtype.float32
    from siirl_dask.devices.accelerator import has_bfloat16

    if has_bfloat16(kind, index):
        return Dtype.bfloat16
    return Dtype.float32


def torch_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Return torch's name for the type of a model on a device."""
    import torch

    found = dtype_on(dtype, DeviceKind(device.type), device.index or 0)
    if found is Dtype.bfloat16:
        return torch.bfloat16
    return torch.float32
