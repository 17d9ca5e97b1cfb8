"""Importance weights for a sampler that is not quite the policy: engine and trainer compute the probability of the same
token differently.

The ratio of a token is ``w = exp(old - rollout)``: the policy before the update over the engine that sampled. Weights
carry no gradient. Where either log-probability is not finite the weight is nan. A token of weight 0 still counts in the
loss's denominator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import LossInputs
from siirl_dask.algorithms.packed import clamp_log_ratio, row_means, spread

CorrectionFn = Callable[[LossInputs], Tensor]
"""``LossInputs -> [K]``: the weight of each token's surrogate loss."""


def truncated_is(inputs: LossInputs, *, cap: float = 2.0) -> Tensor:
    """Truncate the ratio from above, ``min(w, cap)`` (TIS: Yao et al., Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training, https://fengyao.notion.site/off-policy-rl). [K].

    ValueError when ``cap`` is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"cap={cap}: expected more than 0")
    return clamp_log_ratio(_log_ratio(inputs)).exp().clamp(max=cap)


def masked_is(inputs: LossInputs, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """Keep the ratio w where it lies in [low, high] and put 0 elsewhere (IcePop, arXiv:2510.18855, section 2.3). [K].

    ValueError for an empty range.
    """
    _check_range(low, high)
    ratio = clamp_log_ratio(_log_ratio(inputs)).exp()
    return torch.where((ratio < low) | (ratio > high), torch.zeros_like(ratio), ratio)


def reject_sequences(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """Weigh the tokens of a row by 1 if the geometric mean of its ratios lies in [low, high], else by 0 (Liu, Li et
    al., When Speed Kills Stability, https://richardli.xyz/rl-collapse). [K].

    ValueError for an empty range.
    """
    _check_range(low, high)
    ratio = clamp_log_ratio(row_means(_log_ratio(inputs), inputs.offsets)).exp()
    accepted = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    # nan compares as rejected, and weight 0 would hide from the trainer that the row's numbers are broken
    return spread(torch.where(ratio.isnan(), ratio, accepted), inputs.offsets)


def _log_ratio(inputs: LossInputs) -> Tensor:
    return (inputs.old_logprobs - inputs.rollout_logprobs).detach()


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low={low}, high={high}: expected 0 <= low <= high")
