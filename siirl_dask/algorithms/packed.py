"""Sums over the rows of packed tokens, and log-ratios that stay finite.

Packed tokens lie row after row in one dimension: K tokens of R rows. ``offsets`` [R + 1] int64 says
where rows begin: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum the tokens of each row; a row without tokens has 0. [K], [R + 1] -> [R], of the type of
    ``values``.

    A value that is not finite affects its own row alone.
    """
    lengths = offsets.diff()
    rows = torch.arange(len(lengths), device=values.device).repeat_interleave(
        lengths, output_size=len(values)
    )
    return values.new_zeros(len(lengths)).index_add(0, rows, values)


def row_means(values: Tensor, offsets: Tensor) -> Tensor:
    """Average the tokens of each row; a row without tokens has 0 and a finite gradient. [K], [R
    + 1] -> [R].
    """
    return row_sums(values, offsets) / offsets.diff().clamp(min=1)


def row_maxima(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the largest token of each row, nan where one is; a row without tokens has 0. [K],
    [R + 1] -> [R].
    """
    lengths = offsets.diff()
    rows = torch.arange(len(lengths), device=values.device).repeat_interleave(
        lengths, output_size=len(values)
    )
    return values.new_zeros(len(lengths)).scatter_reduce(
        0, rows, values, "amax", include_self=False
    )


def spread(per_row: Tensor, offsets: Tensor) -> Tensor:
    """Repeat each row's number for each of its tokens. [R], [R + 1] -> [K]."""
    return per_row.repeat_interleave(offsets.diff())


_MAX_LOG_RATIO = 20.0  # exp() of a sampler/trainer mismatch must not reach inf


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to +-20, with no gradient beyond. Same shape.

    A value that is not finite becomes nan, which the trainer refuses; a plain clamp would hide an
    inf.
    """
    clamped = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.where(log_ratio.isfinite(), clamped, torch.full_like(clamped, torch.nan))


def clamp_by_advantage_sign(
    log_ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
) -> Tensor:
    """Clamp to at most ``high`` where A > 0 and to at least ``low`` elsewhere. [K], [K] -> [K].

    Only the side towards which the advantage moves the policy is bounded.
    """
    return torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))


def check_clip(clip_low: float, clip_high: float, max_low: float = 1.0) -> None:
    """Check that ``0 <= clip_low <= max_low`` and ``0 <= clip_high``; ValueError otherwise."""
    if not 0 <= clip_low <= max_low or not clip_high >= 0:
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: expected clip_low from 0 to {max_low:g}, "
            "and clip_high at least 0"
        )
