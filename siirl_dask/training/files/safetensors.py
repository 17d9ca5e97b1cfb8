"""Weights from a folder's ``*.safetensors``: of each what this rank holds, or all, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from siirl_dask.errors import ConfigError
from siirl_dask.training.model.lora import first_values, is_adapter
from siirl_dask.training.model.network import Network
from siirl_dask.training.parallel.dtensor import local


def load_safetensors(network: Network, path: str) -> None:
    """Put the folder's weights into the network's parameters; into adapters, which it has none for, what they begin as,
    and 0 into what else it has none for by design.

    ConfigError, by name, when a parameter has no weights there or they have another shape.
    """
    what = f"model.path={path!r}"
    files, names = _files(path), _names(network)
    missing = [name for name, others in names.items() if not {name, *others} & files.keys()]
    if missing := sorted(name for name in missing if name not in network.zero_initialised and not is_adapter(name)):
        raise ConfigError(
            f"{what}: its *.safetensors lack {missing}; trainer.backend=torch may know them by other names"
        )
    for name, parameter in network.by_name().items():
        if name in network.zero_initialised:
            local(parameter).zero_()
        elif is_adapter(name):
            _copy(parameter, first_values(name, parameter.shape))
        else:
            stored = next(other for other in (name, *names[name]) if other in files)
            _copy(parameter, _checked(parameter, files[stored].get_slice(stored), f"{what}: {stored}"))


def read_weights(path: str) -> dict[str, Tensor]:
    """All of the folder's, by the names that its files have, as they are stored: pages of the files, mapped when they
    are read. ConfigError when there are none.
    """
    if found := {name: file.get_tensor(name) for name, file in _files(path).items()}:
        return found
    raise ConfigError(f"model.path={path!r}: it holds no *.safetensors")


def _files(path: str) -> dict[str, Any]:
    """By a weight's name, the file that has it."""
    try:
        opened: list[Any] = [safe_open(file, framework="pt") for file in sorted(Path(path).glob("*.safetensors"))]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path={path!r}: its weights cannot be read: {error}") from error
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # it is no mapping


def _names(network: Network) -> dict[str, list[str]]:
    """Of each parameter all others that are tied to it."""
    once, everything = network.by_name(), network.by_name(tied=True)
    return {name: [other for other, same in everything.items() if same is once[name]] for name in once}


def _checked(parameter: Tensor, stored: Any, what: str) -> Any:
    if list(parameter.shape) != stored.get_shape():
        raise ConfigError(f"{what} has shape {stored.get_shape()}; expected {list(parameter.shape)}")
    return stored


@torch.no_grad()
def _copy(parameter: Tensor, stored: Any) -> None:
    """``stored``: the whole of it, or what reads it by slices."""
    held = local(parameter)
    if not held.numel():
        return
    begins: tuple[int, ...] = (0,) * held.ndim
    if isinstance(parameter, DTensor):
        _, begins = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    held.copy_(stored[tuple(slice(at, at + length) for at, length in zip(begins, held.shape, strict=True))])
