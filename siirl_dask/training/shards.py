"""What a rank holds of a parameter: all of it, or where the parameter is a DTensor, its shard."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """The part that is on this rank, without gradient; it shares the parameter's memory."""
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local()  # type: ignore[attr-defined,no-any-return]
    return tensor.detach()


def pieces(tensor: Tensor) -> int:
    """How many ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def like(parameter: Tensor, part: Tensor) -> Tensor:
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


def whole(tensor: Tensor) -> Tensor:
    """All of it, without gradient. Of a DTensor it is a copy, and every rank must ask for it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    held: DTensor = tensor.detach()  # type: ignore[assignment]
    if held.device_mesh.ndim > 1:  # one axis after the other: torch does no better by itself, and warns of it
        held = held.redistribute(placements=[Replicate(), *held.placements[1:]])
    return held.full_tensor()
