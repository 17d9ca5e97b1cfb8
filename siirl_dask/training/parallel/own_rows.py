"""Of scores that several ranks compute alike, those of a rank's own rows; and of their gradients, all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class TensorParallelRows:
    """Which of a micro-batch's response tokens are of this rank's rows, where ranks go through all of them."""

    mask: Tensor
    """[C] bool."""
    group: Any


def select_own_rows(scores: Sequence[Tensor], rows: TensorParallelRows) -> list[Tensor]:
    """[C] each to [K] each, those of this rank's rows. Every rank must go back through it."""
    apply: Any = _SelectOwnRows.apply
    given: Tensor = apply(torch.stack(list(scores), dim=1), rows.mask.to(scores[0].device), rows.group)
    return [column.clone() for column in given.unbind(1)]  # FSDP wants no views


class _SelectOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, group: Any) -> Tensor:
        ctx.mask, ctx.group = mask, group
        return scores[mask]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = gradient.new_zeros(len(ctx.mask), gradient.shape[1])
        whole[ctx.mask] = gradient
        dist.all_reduce(whole, group=ctx.group)
        return whole, None, None
