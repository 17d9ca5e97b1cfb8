"""DeepSpeed-Ulysses (arXiv:2309.14509): sequence parallelism with all-to-alls around attention.

Each of n ranks takes T/n tokens of a micro-batch through embeddings, layers and head. Before
attention an all-to-all gives it all T tokens of 1/n of the heads, and another one after attention
its own tokens of all heads. Scores go to the rank that a row came from, so a loss sees whole rows.
Gradients return by the same all-to-alls; summed over ranks, they are those of a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from siirl_dask.context import Rank
from siirl_dask.training.parallel.all_to_all import exchange


@dataclass(frozen=True, slots=True)
class Route:
    """An all-to-all that takes scores from the ranks that computed them to the ranks that own
    the rows.
    """

    ranks: Rank
    """Rank of this process in its sequence-parallel group."""
    sent: Sequence[int]
    """[n], scores computed here for the rows of each rank, in the order of rows."""
    received: Sequence[int]
    """[n], scores of this rank's rows that each rank computes."""
    order: Tensor
    """[K] int64, position among the received scores of each token of this rank's rows."""


def to_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: Rank,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens of all heads for all tokens of its heads, in one message to each
    rank.

    [1, H, T/n, D], [1, H_kv, T/n, D] twice -> [1, H/n, T, D], [1, H_kv/n, T, D] twice. n must
    divide H. If it does not divide H_kv, keys and values are repeated, so that H_kv becomes its
    least common multiple with n.
    """
    copies = ranks.size // gcd(ranks.size, key.shape[1])
    if copies > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    shapes = [(each.shape[1] // ranks.size, each.shape[3]) for each in (query, key, value)]
    parts = [
        each[0].transpose(0, 1).unflatten(1, (ranks.size, -1)).flatten(2)
        for each in (query, key, value)
    ]
    received = exchange(
        torch.cat(parts, dim=-1).transpose(0, 1), [1] * ranks.size, [1] * ranks.size, ranks.group
    )
    of_heads = received.flatten(0, 1).split([heads * width for heads, width in shapes], dim=-1)
    q, k, v = (
        part.unflatten(-1, shape).transpose(0, 1)[None]
        for part, shape in zip(of_heads, shapes, strict=True)
    )
    return q, k, v


def to_tokens(output: Tensor, ranks: Rank) -> Tensor:
    """Exchange attention's output of this rank's heads for this rank's tokens. [T, H/n, D] ->
    [T/n, H, D].
    """
    parts = output.unflatten(0, (ranks.size, -1))
    return (
        exchange(parts, [1] * ranks.size, [1] * ranks.size, ranks.group)
        .transpose(0, 1)
        .flatten(1, 2)
    )


def to_owners(scores: Sequence[Tensor], route: Route) -> list[Tensor]:
    """Exchange the scores computed here for those of this rank's rows. [C] each -> [K] each."""
    received = exchange(
        torch.stack(list(scores), dim=1), route.sent, route.received, route.ranks.group
    )
    # FSDP forbids views
    return [column.clone() for column in received[route.order.to(received.device)].unbind(1)]
