"""Number types of models: torch's name for one, and what ``auto`` stands for on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from siirl_dask.config import Dtype
from siirl_dask.context import Device, DeviceKind

if TYPE_CHECKING:
    import torch


def dtype_on(dtype: Dtype, device: Device) -> Dtype:
    """Return ``dtype``, and for ``auto`` bfloat16 on an accelerator that computes in it, else float32.

    A run decides once for all its workers, before they build anything: see driver/number_type.py.
    """
    if dtype is not Dtype.auto:
        return dtype
    if device.kind is DeviceKind.CPU:
        return Dtype.float32
    from siirl_dask.devices.accelerator import has_bfloat16

    return Dtype.bfloat16 if has_bfloat16(device.kind, device.index) else Dtype.float32


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's type. ValueError for ``auto``, which is none."""
    import torch

    if dtype is Dtype.auto:
        raise ValueError("Dtype.auto is no number type of torch: dtype_on decides what it stands for")
    return torch.bfloat16 if dtype is Dtype.bfloat16 else torch.float32
