"""Log-ratios of probabilities, kept where exp() of them is a number, and never so that a broken model goes unseen."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # exp() of a sampler/trainer mismatch must not reach inf


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamped to +-20, with no gradient beyond. Same shape.

    What is not finite becomes nan, which the trainer refuses; a clamp would hide it.
    """
    clamped = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.where(log_ratio.isfinite(), clamped, torch.full_like(clamped, torch.nan))


def check_clip(clip_low: float, clip_high: float, most_low: float = 1.0) -> None:
    """ValueError unless ``0 <= clip_low <= most_low`` and ``0 <= clip_high``."""
    if not 0 <= clip_low <= most_low or not clip_high >= 0:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: expected 0 to {most_low:g}, and at least 0")


def clipped_where_it_gains(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """At most ``high`` where A > 0, else at least ``low``: bounded on the side that a surrogate would move to. [K]."""
    return torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
