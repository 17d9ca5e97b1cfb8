"""How the losses of tokens become a mini-batch's: weights that depend on a row's own length and on totals over all
workers, so that the sum is the same however rows are shared out over micro-batches and workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from siirl_dask.algorithms.packed import spread


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole mini-batch, on all workers."""

    tokens: int
    """Tokens that are learned from."""
    rows: int
    """Rows that have such."""


Aggregation = Callable[[Tensor, Totals], Tensor]
"""``(offsets [R + 1], totals) -> weights [K] float32`` with which token losses are summed."""


def token_mean(offsets: Tensor, totals: Totals) -> Tensor:
    """``1 / tokens``: every token counts alike, as in DAPO (arXiv:2503.14476). [R + 1] -> [K]."""
    return _constant(offsets, 1 / max(1, totals.tokens))


def sequence_mean_token_mean(offsets: Tensor, totals: Totals) -> Tensor:
    """``1 / (rows * length of the row)``: every row counts alike, as in GRPO (arXiv:2402.03300). [R + 1] -> [K]."""
    return spread(1 / (totals.rows * offsets.diff()).clamp(min=1).float(), offsets)


def sequence_mean_token_sum(offsets: Tensor, totals: Totals) -> Tensor:
    """``1 / rows``: a row counts with its length. [R + 1] -> [K]."""
    return _constant(offsets, 1 / max(1, totals.rows))


def sequence_mean_token_sum_norm(offsets: Tensor, totals: Totals, *, length: int) -> Tensor:
    """``1 / (rows * length)`` with a fixed length, as in Dr.GRPO (arXiv:2503.20783). [R + 1] -> [K].

    ``length`` is the longest response there can be. ValueError when it is not at least 1.
    """
    if not length >= 1:
        raise ValueError(f"length={length}: expected at least 1, the longest response there can be")
    return _constant(offsets, 1 / (max(1, totals.rows) * length))


def _constant(offsets: Tensor, weight: float) -> Tensor:
    return torch.full((int(offsets[-1]),), weight, device=offsets.device)
