"""Copies a state to the host's memory, from where a checkpoint is written while training goes on.

torch's own stagers copy one tensor after the other and wait for each: to pageable memory, through a
buffer of the driver's, or to pinned memory that is up to twice as large as the tensors, since each
is rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from siirl_dask.devices import accelerator
from siirl_dask.devices.accelerator import host_memory
from siirl_dask.training.parallel.dtensor import like_dtensor, local


@torch.no_grad()
def copy_to_host(state: Any) -> Any:
    """Return a copy of nested mappings, lists and tuples of tensors, DTensors and plain values, all
    in host memory.

    What is on an accelerator is copied to pinned memory without waiting for one tensor after the
    other: all are there when this returns. That memory is as large as what is copied, but for what
    torch rounds its pieces up, and torch keeps it for the next checkpoint.
    """
    on_devices = {id(tensor): local(tensor) for tensor in _tensors(state) if _is_on_device(tensor)}
    sizes = {key: part.nbytes for key, part in on_devices.items() if part.nbytes}
    pinned = {}
    if sizes:
        pinned = host_memory(sizes, pinned=True)
    copied = _copied(state, pinned)
    for device in {part.device for part in on_devices.values()}:
        accelerator.synchronize(device)
    return copied


def _copied(value: Any, pinned: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _copied_tensor(value, pinned.get(id(value)))
    if isinstance(value, Mapping):
        return {key: _copied(inner, pinned) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner, pinned) for inner in value]
    if isinstance(value, tuple):
        return tuple(_copied(inner, pinned) for inner in value)
    return deepcopy(value)


def _copied_tensor(tensor: Tensor, memory: Tensor | None) -> Tensor:
    part = local(tensor)
    if memory is None:
        return like_dtensor(tensor, torch.empty(part.size(), dtype=part.dtype).copy_(part))
    copy = memory.view(part.dtype).view(part.size())
    return like_dtensor(tensor, copy.copy_(part, non_blocking=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _is_on_device(tensor: Tensor) -> bool:
    return accelerator.pins_host_memory(local(tensor).device)
