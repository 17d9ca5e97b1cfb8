"""Sums over the rows of packed tokens.

``offsets`` [R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each row's tokens, 0 for a row without any. [K], [R + 1] -> [R], of the type of ``values``.

    What is not finite stays in its row.
    """
    lengths = offsets.diff()
    rows = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths, output_size=len(values))
    return values.new_zeros(len(lengths)).index_add(0, rows, values)


def row_means(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean of each row's tokens, 0 for a row without any, and no nan in its gradient. [K], [R + 1] -> [R]."""
    return row_sums(values, offsets) / offsets.diff().clamp(min=1)


def spread(per_row: Tensor, offsets: Tensor) -> Tensor:
    """Each row's number, repeated for each of its tokens. [R], [R + 1] -> [K]."""
    return per_row.repeat_interleave(offsets.diff())
