"""Surrogates whose importance ratio is that of the whole response."""

from __future__ import annotations

from math import inf

from siirl_dask.algorithms.losses import LossInputs, TokenLoss, clipped_loss
from siirl_dask.algorithms.packed import row_means, spread
from siirl_dask.algorithms.ratios import bounded, check_clip, clipped_where_it_gains


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """PPO's loss with ``s = exp(mean of the row's logp - old)`` as the ratio of each of its tokens (arXiv:2507.18071).

    As in the paper's token form, a token's gradient is ``s grad logp`` of that token alone:
    ``log s_t = sg(mean) + logp - sg(logp)``. To be aggregated by ``sequence_mean_token_mean``.

    Metrics: ``ratio`` s; ``clip_fraction``, tokens of rows that are clipped.
    """
    mean = spread(row_means(inputs.logprobs - inputs.old_logprobs, inputs.offsets), inputs.offsets)
    ratio = bounded(mean.detach() + (inputs.logprobs - inputs.logprobs.detach())).exp()
    return clipped_loss(ratio, inputs.advantages, clip_low, clip_high)


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """``-A`` times the geometric mean of the row's ratios, each clipped where its advantage's sign says so
    (arXiv:2507.20673): with A > 0 at ``exp(clip_high)`` from above, with A < 0 at ``exp(-clip_low)`` from below.

    The row's loss is that of each of its tokens. To be aggregated by ``sequence_mean_token_mean``.

    Metrics: ``ratio``, the geometric mean; ``clip_fraction``, tokens that are clipped.
    """
    check_clip(clip_low, clip_high, inf)
    log_ratio = bounded(inputs.logprobs - inputs.old_logprobs)
    clipped = clipped_where_it_gains(log_ratio, inputs.advantages, -clip_low, clip_high)
    ratio = spread(row_means(clipped, inputs.offsets).exp(), inputs.offsets)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (clipped != log_ratio).to(ratio.dtype)}
    return TokenLoss(loss=-inputs.advantages * ratio, metrics=metrics)
