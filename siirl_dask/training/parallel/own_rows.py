"""Selects this rank's rows from scores that a tensor-parallel group computed together, and sums
gradients back.
"""

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
    """Selects this rank's response tokens from the C of a micro-batch that the whole group
    computes.
    """

    mask: Tensor
    """[C] bool."""
    group: Any
    """The tensor-parallel process group."""


def select_own_rows(scores: Sequence[Tensor], rows: TensorParallelRows) -> list[Tensor]:
    """Select the scores of this rank's rows. [C] each -> [K] each. All ranks must run the
    backward pass.
    """
    apply: Any = _SelectOwnRows.apply
    selected: Tensor = apply(
        torch.stack(list(scores), dim=1), rows.mask.to(scores[0].device), rows.group
    )
    return [column.clone() for column in selected.unbind(1)]  # FSDP forbids views


class _SelectOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, group: Any) -> Tensor:
        ctx.mask = mask
        ctx.group = group
        return scores[mask]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        full = gradient.new_zeros(len(ctx.mask), gradient.shape[1])
        full[ctx.mask] = gradient
        # each token is one rank's, so the sum puts the gradients together
        dist.all_reduce(full, group=ctx.group)
        return full, None, None
