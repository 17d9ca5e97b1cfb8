"""The gradients of a model as one flat tensor, which workers sum in a few large messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from siirl_dask.training.shards import like, local, pieces

_BUCKET = 16 * 2**20  # elements: 64 MiB of float32 a message, which bounds the copies a backend makes


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """Sum over the group, in place; every rank gets the same bits. ``None`` is a group of one."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


class FlatGradients:
    """``parameter.grad`` of each parameter is a view of it, so that nothing is copied in or out.

    Of a sharded parameter it holds this rank's shard, which FSDP adds to in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        held = [(parameter, local(parameter)) for parameter in parameters]
        self._pieces = [pieces(parameter) for parameter, _ in held]
        self.flat = torch.zeros(sum(part.numel() for _, part in held), device=held[0][1].device)
        views = self.flat.split([part.numel() for _, part in held])
        self.parts = [view.view_as(part) for (_, part), view in zip(held, views, strict=True)]
        for (parameter, _), part in zip(held, self.parts, strict=True):
            parameter.grad = like(parameter, part)

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, group: Any) -> None:
        for bucket in self.flat.split(_BUCKET):
            all_reduce(bucket, group)

    def squares(self, ranks: int = 1) -> Tensor:
        """[] float64: the sum of the squares; of what several of ``ranks`` hold alike, each counts its share. float32
        loses the fifth digit over a million elements.
        """
        squares = _squares(self.flat.split(_BUCKET))
        for part, count in zip(self.parts, self._pieces, strict=True):
            if count < ranks:  # tensor parallel ranks have embeddings and norms alike
                squares -= (1 - count / ranks) * _squares([part])
        return squares

    def clip(self, norm: float, limit: float) -> None:
        """Scale to ``limit`` if ``norm``, that of all gradients together, is more."""
        if norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
