"""Parameters that are plain tensors or DTensors: this rank's shard, the full tensor, and copies
of nested state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# torch 2.11 has it by the other name only
_all_gather_single = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
# bytes of full tensors per message; one message per tensor is slow for small ones
_BUCKET = 16 * 2**20


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, or the tensor itself if it is no DTensor; detached, in the same
    memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # several times faster than through autograd
        return tensor.to_local()


def shard_count(tensor: Tensor) -> int:
    """Return the number of different shards of ``tensor`` over all ranks; 1 if it is no DTensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def like_dtensor(parameter: Tensor, part: Tensor) -> Tensor:
    """Return this rank's ``part`` as a tensor with the layout of ``parameter`` over the ranks,
    in the same memory.
    """
    if isinstance(parameter, DTensor):
        # DTensor.from_local would move the part to the mesh's device, and offloaded or parked parts
        # are the host's
        meta = TensorMeta(parameter.shape, parameter.stride(), part.dtype)
        spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
        return DTensor(part, spec, requires_grad=False)
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, detached. For a DTensor this is an all-gather that every rank must
    call, and a copy.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    sharded: DTensor = tensor.detach()  # type: ignore[assignment]
    # one axis after the other: torch does the same by itself, with a warning
    if sharded.device_mesh.ndim > 1:
        sharded = sharded.redistribute(placements=[Replicate(), *sharded.placements[1:]])
    return sharded.full_tensor()


def full_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each full tensor, in order, gathering neighbours in one message. Every rank must
    iterate to the end.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and (size + tensor.nbytes > _BUCKET or not _same_layout(tensor, bucket[0][1])):
            yield from _gather(bucket)
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield from _gather(bucket)


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Return whether one all-gather can bring both."""
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return False
    if one.device_mesh != other.device_mesh or one.placements != other.placements:
        return False
    if one.dtype != other.dtype:
        return False
    return _sharded_by_fsdp(one)


def _sharded_by_fsdp(tensor: DTensor) -> bool:
    """Return whether only the last mesh axis shards the tensor, along its first dimension."""
    *others, last = tensor.placements
    if type(last) is not Shard or last.dim != 0:
        return False
    return all(placement.is_replicate() for placement in others)


def _gather(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gather tensors of the same layout in one message. The last ranks may have smaller shards,
    padded here.
    """
    first = named[0][1]
    if len(named) == 1 or not isinstance(first, DTensor):
        yield from ((name, full_tensor(tensor)) for name, tensor in named)
        return
    group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
    ranks = dist.get_world_size(group)
    rows = [-(-tensor.shape[0] // ranks) for _, tensor in named]
    widths = [
        count * tensor.shape[1:].numel() for count, (_, tensor) in zip(rows, named, strict=True)
    ]
    message = local(first).new_zeros(sum(widths))
    for room, (_, tensor) in zip(message.split(widths), named, strict=True):
        shard = local(tensor)
        room[: shard.numel()] = shard.reshape(-1)
    gathered = message.new_empty(ranks * len(message))
    _all_gather_single(gathered, message, group=group)
    parts = gathered.view(ranks, -1).split(widths, dim=1)
    for part, count, (name, tensor) in zip(parts, rows, named, strict=True):
        yield name, part.reshape(ranks * count, *tensor.shape[1:])[: tensor.shape[0]]


@torch.no_grad()
def copy_state(target: Mapping[str, Any], source: Mapping[str, Any], where: str = "state") -> None:
    """Copy the tensors of ``source`` into those of ``target``. ValueError where names or shapes
    differ.

    A tensor that was loaded in place is the same memory and costs nothing.
    """
    if target.keys() != source.keys():
        lacking = sorted(target.keys() - source.keys())
        other = sorted(source.keys() - target.keys())
        raise ValueError(f"{where}: it lacks {lacking} and has {other}, which are not known here")
    for name, value in target.items():
        if isinstance(value, Tensor):
            _copy_tensor(value, source[name], f"{where}.{name}")
        else:
            copy_state(value, source[name], f"{where}.{name}")


def _copy_tensor(target: Tensor, source: Tensor, where: str) -> None:
    to_shard = local(target)
    from_shard = local(source)
    if target.shape != source.shape or to_shard.shape != from_shard.shape:
        raise ValueError(
            f"{where}: it has shape {list(source.shape)}; expected {list(target.shape)}, laid out "
            "alike"
        )
    if to_shard.data_ptr() != from_shard.data_ptr():
        to_shard.copy_(from_shard)
