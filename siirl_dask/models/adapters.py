"""Adapters by name (LoRA, arXiv:2106.09685): ``q_proj.weight`` is changed by A in
``q_proj.lora_A.weight``, [rank, in], and B in ``q_proj.lora_B.weight``, [out, rank].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WEIGHT = ".weight"
A = ".lora_A.weight"
B = ".lora_B.weight"


class Adapter(NamedTuple):
    """The two halves of a layer's adapter."""

    a: Tensor
    b: Tensor


def is_adapter(name: str) -> bool:
    """Return whether the parameter is an adapter's A or B."""
    return name.endswith((A, B))


def merge(weight: Tensor, adapter: Adapter, scaling: float) -> Tensor:
    """Return ``weight + scaling * B A`` in float32, on the adapter's device. [out, in] -> [out,
    in].
    """
    a, b = (half.to(torch.float32) for half in adapter)
    return torch.addmm(weight.to(b.device, torch.float32), b, a, alpha=scaling)


def pair(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Sequence[int]], version: int
) -> dict[str, Adapter]:
    """Return copies of the adapters by the name of the weight that each changes; ``shapes`` has
    those of all weights.

    ValueError, naming what does not fit: an unknown weight, half an adapter, another shape, nothing
    at all.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        end = B
        if name.endswith(A):
            end = A
        halves.setdefault(name.removesuffix(end) + WEIGHT, {})[end] = tensor.detach().to(copy=True)
    wrong = sorted(_wrong(halves, shapes))
    if not halves and not wrong:
        wrong = ["there are none"]
    if wrong:
        raise ValueError(f"adapters of version {version} do not fit: {'; '.join(wrong[:5])}")
    return {name: Adapter(found[A], found[B]) for name, found in halves.items()}


def _wrong(
    halves: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    for name, found in halves.items():
        layer = name.removesuffix(WEIGHT)
        if name not in shapes:
            yield f"there is no weight {name!r}"
        elif missing := [end for end in (A, B) if end not in found]:
            yield f"{layer}{missing[0]} is missing"
        elif [found[B].shape[0], found[A].shape[-1]] != list(shapes[name]) or found[A].shape[
            0
        ] != found[B].shape[-1]:
            given = f"{list(found[A].shape)} and {list(found[B].shape)}"
            yield f"{layer} has A and B of shapes {given} for a weight of {list(shapes[name])}"
