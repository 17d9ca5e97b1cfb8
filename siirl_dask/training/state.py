"""State as nested dicts of tensors, which torch.distributed.checkpoint saves and loads in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from siirl_dask.training.shards import local


@torch.no_grad()
def put(target: Mapping[str, Any], given: Mapping[str, Any], where: str = "state") -> None:
    """Copy ``given`` into the tensors of ``target``. ValueError where names or shapes are not the same.

    What was loaded in place is there already and costs nothing.
    """
    if target.keys() != given.keys():
        lacking, other = sorted(target.keys() - given.keys()), sorted(given.keys() - target.keys())
        raise ValueError(f"{where}: it lacks {lacking} and has {other}, which are not known here")
    for name, mine in target.items():
        if isinstance(mine, Tensor):
            _put_tensor(mine, given[name], f"{where}.{name}")
        else:
            put(mine, given[name], f"{where}.{name}")


def _put_tensor(target: Tensor, given: Tensor, where: str) -> None:
    here, there = local(target), local(given)
    if target.shape != given.shape or here.shape != there.shape:
        raise ValueError(f"{where}: it has shape {list(given.shape)}; expected {list(target.shape)}, laid out alike")
    if here.data_ptr() != there.data_ptr():
        here.copy_(there)
