"""Weights that turn the losses of tokens into the loss of a mini-batch.

A token's weight depends on its own row's length and on totals over all workers, so the weighted sum
is the same however rows are divided over micro-batches and workers.

A row is a sequence. Where an episode has several rows, ``segment_weights`` gives each token the
weight that it has in the episode's one row, and ``Totals.rows`` counts episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from siirl_dask.algorithms.packed import spread


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole mini-batch, summed over all workers."""

    tokens: int
    """Number of tokens that the loss trains on."""
    rows: int
    """Number of sequences with at least one such token: of rows, or of episodes where these have
    several rows."""


Aggregation = Callable[[Tensor, Totals], Tensor]
"""``(offsets [R + 1], totals) -> weights [K] float32``; the loss is the weighted sum of K token
losses."""


def token_mean(offsets: Tensor, totals: Totals) -> Tensor:
    """Weigh every token alike, ``1 / tokens``, as DAPO does (arXiv:2503.14476). [R + 1] -> [K]."""
    return _constant(offsets, 1 / max(1, totals.tokens))


def sequence_mean_token_mean(offsets: Tensor, totals: Totals) -> Tensor:
    """Weigh every row alike, ``1 / (rows * length of the row)``, as GRPO does
    (arXiv:2402.03300). [R + 1] -> [K].
    """
    return spread(1 / (totals.rows * offsets.diff()).clamp(min=1).float(), offsets)


def sequence_mean_token_sum(offsets: Tensor, totals: Totals) -> Tensor:
    """Weigh every token by ``1 / rows``, so that a row counts with its length. [R + 1] -> [K]."""
    return _constant(offsets, 1 / max(1, totals.rows))


def sequence_mean_token_sum_norm(offsets: Tensor, totals: Totals, *, length: int) -> Tensor:
    """Weigh every token by ``1 / (rows * length)`` with a fixed length, as Dr.GRPO does
    (arXiv:2503.20783). [R + 1] -> [K].

    ``length`` is the longest response that generation allows. ValueError when it is below 1.
    """
    if not length >= 1:
        raise ValueError(f"length={length}: expected at least 1, the longest response there can be")
    return _constant(offsets, 1 / (max(1, totals.rows) * length))


def segment_weights(
    aggregate: Aggregation,
    offsets: Tensor,
    totals: Totals,
    starts: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Return the weights of rows that are parts of longer sequences. [R + 1], [R], [R] -> [K].

    Row r holds its sequence's tokens from ``starts[r]`` on, of ``lengths[r]`` in all. ``aggregate``
    is given the whole sequences, and of its weights those of the rows' own tokens are kept: an
    episode counts as one, however it is cut.
    """
    whole = torch.cat([offsets[:1], lengths.cumsum(0)])
    own = torch.arange(int(offsets[-1]), device=offsets.device) - spread(offsets[:-1], offsets)
    return aggregate(whole, totals)[own + spread(whole[:-1] + starts, offsets)]


def _constant(offsets: Tensor, weight: float) -> Tensor:
    return torch.full((int(offsets[-1]),), weight, device=offsets.device)
