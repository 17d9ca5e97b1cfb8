"""CPGD: a policy gradient that is clipped in log-probability, and a drift term that pulls back to the old policy."""

from __future__ import annotations

from math import log1p

from siirl_dask.algorithms.losses import LossInputs, TokenLoss
from siirl_dask.algorithms.ratios import bounded, clipped_where_it_gains

_MAX_DRIFT = 2.0  # of r - 1: beyond a ratio of 3 the pull grows no further


def cpgd(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, drift: float = 1e-3) -> TokenLoss:
    """``-A`` times logp, which is bounded by ``old + ln(1 + clip_high)`` from above where A > 0 and else by
    ``old + ln(1 - clip_low)`` from below, plus ``drift min(sg(r) - 1, 2) logp``, ``r = exp(logp - old)``
    (arXiv:2505.12504). The drift term's gradient is that of k3 of KL(old, current). ``drift``'s default is siiRL's.

    ValueError when ``clip_low`` is not from 0 to below 1.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose logp is at its bound; ``drift``, the term before its factor.
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low={clip_low}: expected 0 to below 1, so that ln(1 - clip_low) is a number")
    log_ratio = inputs.logprobs - inputs.old_logprobs
    clipped = clipped_where_it_gains(log_ratio, inputs.advantages, log1p(-clip_low), log1p(clip_high))
    ratio = bounded(log_ratio.detach()).exp()
    # nan where logp or old is not finite, with a drift of 0 too: the clipping would hide that
    pull = (ratio - 1).clamp(max=_MAX_DRIFT) * inputs.logprobs
    metrics = {
        "ratio": ratio,
        "clip_fraction": (clipped != log_ratio).to(ratio.dtype),
        "drift": pull.detach(),
    }
    return TokenLoss(loss=-inputs.advantages * (inputs.old_logprobs + clipped) + drift * pull, metrics=metrics)
