"""A differentiable all-to-all between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send ``sent[i]`` entries along the first dimension to rank i and receive ``received[i]`` from
    it, in order.

    Gradients return by the same way. All ranks of the group must call, and run the backward pass.
    """
    apply: Any = _AllToAll.apply
    result: Tensor = apply(tensor, list(sent), list(received), group)
    return result


class _AllToAll(torch.autograd.Function):
    """A differentiable all-to-all: torch's own is deprecated, and its replacement private."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        sent: list[int],
        received: list[int],
        group: Any,
    ) -> Tensor:
        ctx.reverse = received, sent, group
        return _all_to_all(tensor, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, *ctx.reverse), None, None, None


def _all_to_all(tensor: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result
