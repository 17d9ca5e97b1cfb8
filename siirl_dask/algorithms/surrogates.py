"""CISPO: the importance ratio is clipped as a weight, so that every token keeps its gradient."""

from __future__ import annotations

from siirl_dask.algorithms.losses import LossInputs, TokenLoss
from siirl_dask.algorithms.ratios import bounded, check_clip


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 0.28) -> TokenLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp``, ``r = exp(logp - old)`` (MiniMax-M1, arXiv:2506.13585).

    The paper has no lower bound, which is ``clip_low = 1``, and tunes the upper one without naming it; 0.28 is DAPO's.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose weight is clipped.
    """
    check_clip(clip_low, clip_high)
    ratio = bounded(inputs.logprobs.detach() - inputs.old_logprobs).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio, "clip_fraction": (weight != ratio).to(ratio.dtype)}
    return TokenLoss(loss=-weight * inputs.advantages * inputs.logprobs, metrics=metrics)
