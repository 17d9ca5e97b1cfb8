"""Reads a folder's ``*.safetensors`` into a network: each rank its own shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from siirl_dask.config import LoraConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapter_folder import read_adapters
from siirl_dask.models.adapters import is_adapter
from siirl_dask.models.weight_names import Stored
from siirl_dask.training.model.lora import first_values
from siirl_dask.training.model.network import Network
from siirl_dask.training.parallel.dtensor import local


def load_safetensors(
    network: Network,
    path: str,
    files: Mapping[str, Stored],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Load the folder's weights into the network's parameters, each rank its own shards, and into
    buffers that files have; ``progress`` is called for each parameter. ``files`` says where each of
    them is stored.

    Adapters get their initial values and zero-initialised parameters 0. ConfigError, by name, for a
    parameter that the files lack or have in another shape.
    """
    subject = f"model.path={path!r}"
    names = _names(network)
    missing = [name for name, others in names.items() if not {name, *others} & files.keys()]
    missing = sorted(
        name for name in missing if name not in network.zero_initialised and not is_adapter(name)
    )
    if missing:
        raise ConfigError(f"{subject}: its *.safetensors lack {missing}")
    for name, parameter in network.by_name().items():
        if name in network.zero_initialised:
            local(parameter).zero_()
        elif not is_adapter(name):
            stored, file = next(files[other] for other in (name, *names[name]) if other in files)
            _copy(parameter, _checked(parameter, file.get_slice(stored), f"{subject}: {stored}"))
        progress()
    for name, buffer in network.stored_buffers().items():
        if name not in files:
            raise ConfigError(f"{subject}: its *.safetensors lack the buffer {name}")
        stored, file = files[name]
        _checked(buffer, file.get_slice(stored), f"{subject}: {stored}")
        buffer.copy_(file.get_tensor(stored))
    network.each_adapter(
        lambda name, parameter: _copy(parameter, first_values(name, parameter.shape))
    )


def load_adapters(network: Network, lora: LoraConfig) -> None:
    """Load the adapters of ``lora.path`` for every agent of the network, each rank its own shards;
    nothing is done without a path, and for a reference, which has no adapters. ConfigError, by
    name, unless they are the network's.
    """
    if lora.path is None or network.scaling is None:
        return
    shapes = {
        name: tuple(each.shape) for name, each in network.by_name().items() if is_adapter(name)
    }
    adapters = read_adapters(lora, shapes)
    network.each_adapter(lambda name, parameter: _copy(parameter, adapters[name]))


def _names(network: Network) -> dict[str, list[str]]:
    """Return, for each parameter, the names of all that are tied to it, itself included."""
    once = network.by_name()
    every_name = network.by_name(tied=True)
    return {
        name: [other for other, same in every_name.items() if same is once[name]] for name in once
    }


def _checked(parameter: Tensor, stored: Any, subject: str) -> Any:
    if list(parameter.shape) != stored.get_shape():
        raise ConfigError(
            f"{subject} has shape {stored.get_shape()}; expected {list(parameter.shape)}"
        )
    return stored


@torch.no_grad()
def _copy(parameter: Tensor, stored: Any) -> None:
    """Copy this rank's shard of ``stored``, a full tensor or a reader that is indexed like one."""
    shard = local(parameter)
    if not shard.numel():
        return
    starts: tuple[int, ...] = (0,) * shard.ndim
    if isinstance(parameter, DTensor):
        _, starts = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    shard.copy_(
        stored[
            tuple(slice(at, at + length) for at, length in zip(starts, shard.shape, strict=True))
        ]
    )
