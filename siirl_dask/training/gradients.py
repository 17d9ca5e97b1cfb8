"""The gradients of a model as one flat tensor, which workers sum in a few large messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET = 16 * 2**20  # elements: 64 MiB of float32 a message, which bounds the copies a backend makes


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """Sum over the group, in place; every rank gets the same bits. ``None`` is a group of one."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


class FlatGradients:
    """``parameter.grad`` of each parameter is a view of it, so that nothing is copied in or out."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        for parameter, view in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, group: Any) -> None:
        for bucket in self.flat.split(_BUCKET):
            all_reduce(bucket, group)

    def norm(self) -> float:
        """In float64: float32 loses the fifth digit over a million elements."""
        buckets = [torch.linalg.vector_norm(bucket, dtype=torch.float64) for bucket in self.flat.split(_BUCKET)]
        return float(torch.linalg.vector_norm(torch.stack(buckets)))

    def clip(self, norm: float, limit: float) -> None:
        """Scale to ``limit`` if ``norm``, that of all gradients together, is more."""
        if norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))
