"""What a rank holds of a parameter: all of it, or where the parameter is a DTensor, its shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

_BUCKET = 16 * 2**20  # bytes of whole tensors that one message brings: a message each costs small ones more


def local(tensor: Tensor) -> Tensor:
    """The part that is on this rank, without gradient; it shares the parameter's memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # many times as fast as through autograd
        return tensor.to_local()


def shard_count(tensor: Tensor) -> int:
    """How many ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def like_dtensor(parameter: Tensor, part: Tensor) -> Tensor:
    """``part`` of this rank as a tensor that is laid out over the ranks as ``parameter`` is; it shares its memory."""
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it, without gradient. Of a DTensor it is a copy, and every rank must ask for it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    held: DTensor = tensor.detach()  # type: ignore[assignment]
    if held.device_mesh.ndim > 1:  # one axis after the other: torch does no better by itself, and warns of it
        held = held.redistribute(placements=[Replicate(), *held.placements[1:]])
    return held.full_tensor()


def full_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same of each, in order: as many are whole at a time as one message brings. Every rank must go through all."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if waiting and (size + tensor.nbytes > _BUCKET or not _alike(tensor, waiting[0][1])):
            yield from _gathered(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield from _gathered(waiting)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether one message can bring both."""
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return False
    same = (one.device_mesh, one.placements, one.dtype) == (other.device_mesh, other.placements, other.dtype)
    return same and _cut_by_fsdp(one)


def _cut_by_fsdp(tensor: DTensor) -> bool:
    """Whether it is cut along its first dimension, over the last one of the mesh, and in no other way."""
    *others, last = tensor.placements
    return type(last) is Shard and last.dim == 0 and all(placement.is_replicate() for placement in others)


def _gathered(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Of several, all are alike. The last ranks may have less of a tensor than the others."""
    first = named[0][1]
    if len(named) == 1 or not isinstance(first, DTensor):
        yield from ((name, full_tensor(tensor)) for name, tensor in named)
        return
    group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
    ranks = dist.get_world_size(group)
    rows = [-(-tensor.shape[0] // ranks) for _, tensor in named]
    widths = [each * tensor.shape[1:].numel() for each, (_, tensor) in zip(rows, named, strict=True)]
    mine = local(first).new_zeros(sum(widths))
    for place, (_, tensor) in zip(mine.split(widths), named, strict=True):
        part = local(tensor)
        place[: part.numel()] = part.reshape(-1)
    everyone = mine.new_empty(ranks * len(mine))
    dist.all_gather_single(everyone, mine, group=group)
    parts = everyone.view(ranks, -1).split(widths, dim=1)
    for columns, each, (name, tensor) in zip(parts, rows, named, strict=True):
        yield name, columns.reshape(ranks * each, *tensor.shape[1:])[: tensor.shape[0]]


@torch.no_grad()
def copy_state(target: Mapping[str, Any], given: Mapping[str, Any], where: str = "state") -> None:
    """Copy ``given`` into the tensors of ``target``. ValueError where names or shapes are not the same.

    What was loaded in place is there already and costs nothing.
    """
    if target.keys() != given.keys():
        lacking, other = sorted(target.keys() - given.keys()), sorted(given.keys() - target.keys())
        raise ValueError(f"{where}: it lacks {lacking} and has {other}, which are not known here")
    for name, mine in target.items():
        if isinstance(mine, Tensor):
            _copy_tensor(mine, given[name], f"{where}.{name}")
        else:
            copy_state(mine, given[name], f"{where}.{name}")


def _copy_tensor(target: Tensor, given: Tensor, where: str) -> None:
    here, there = local(target), local(given)
    if target.shape != given.shape or here.shape != there.shape:
        raise ValueError(f"{where}: it has shape {list(given.shape)}; expected {list(target.shape)}, laid out alike")
    if here.data_ptr() != there.data_ptr():
        here.copy_(there)
