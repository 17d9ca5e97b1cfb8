"""DeepSpeed-Ulysses (arXiv:2309.14509): ranks that share the tokens of a micro-batch, and the heads of its attention.

Each of n ranks takes T / n tokens through embeddings, layers and head. Before attention an all-to-all gives it all T
tokens of 1 / n of the heads, and one after it gives back its own tokens of all heads. Scores go to the rank that a row
came from, so a loss sees whole rows. Gradients take the same ways back: summed over ranks, they are a single process's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from siirl_dask.context import Rank


@dataclass(frozen=True, slots=True)
class Route:
    """How the scores of response tokens go from the ranks that computed them to those whose rows they are of."""

    ranks: Rank
    """This rank among those that share tokens."""
    sent: Sequence[int]
    """[n]: how many of the tokens computed here are of each rank's rows; they lie in the order of rows."""
    received: Sequence[int]
    """[n]: how many of the tokens of this rank's rows each rank computes."""
    order: Tensor
    """[K] int64: of each token of this rank's rows, its place among those received."""


def to_heads(query: Tensor, key: Tensor, value: Tensor, ranks: Rank) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens of all heads to all tokens of its heads, in one message to each rank.

    [1, H, T/n, D], [1, H_kv, T/n, D] twice -> [1, H/n, T, D], [1, H_kv/n, T, D] twice. n must divide H; where it does
    not divide H_kv, keys and values are repeated until it does, and so H_kv becomes its least common multiple with n.
    """
    copies = ranks.size // gcd(ranks.size, key.shape[1])
    if copies > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    shapes = [(each.shape[1] // ranks.size, each.shape[3]) for each in (query, key, value)]
    parts = [each[0].transpose(0, 1).unflatten(1, (ranks.size, -1)).flatten(2) for each in (query, key, value)]
    mine = _exchange(torch.cat(parts, dim=-1).transpose(0, 1), [1] * ranks.size, [1] * ranks.size, ranks)
    of_heads = mine.flatten(0, 1).split([heads * width for heads, width in shapes], dim=-1)
    q, k, v = (part.unflatten(-1, shape).transpose(0, 1)[None] for part, shape in zip(of_heads, shapes, strict=True))
    return q, k, v


def to_tokens(output: Tensor, ranks: Rank) -> Tensor:
    """What attention gave: all tokens of this rank's heads to its tokens of all heads. [T, H/n, D] -> [T/n, H, D]."""
    parts = output.unflatten(0, (ranks.size, -1))
    return _exchange(parts, [1] * ranks.size, [1] * ranks.size, ranks).transpose(0, 1).flatten(1, 2)


def to_owners(scores: Sequence[Tensor], route: Route) -> list[Tensor]:
    """Numbers of the tokens computed here, [C] each, to those of the tokens of this rank's rows, [K] each."""
    given = _exchange(torch.stack(list(scores), dim=1), route.sent, route.received, route.ranks)
    return [column.clone() for column in given[route.order.to(given.device)].unbind(1)]  # FSDP wants no views


def _exchange(tensor: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Rank) -> Tensor:
    """``sent[i]`` of the entries along the first dimension to rank i, and ``received[i]`` from it, in their order."""
    apply: Any = _AllToAll.apply
    result: Tensor = apply(tensor, list(sent), list(received), ranks.group)
    return result


class _AllToAll(torch.autograd.Function):
    """torch's own differentiable one is deprecated, and what it is to be replaced by is private."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        return _all_to_all(tensor, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, *ctx.way_back), None, None, None


def _all_to_all(tensor: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result
