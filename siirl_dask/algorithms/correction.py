"""Weights that correct for a sampler that is not quite the policy: engine and trainer compute the same token's
probability differently.

``w = exp(old - rollout)``: the policy before the update over the engine that sampled. Weights carry no gradient; where
either is not finite the weight is nan; a token of weight 0 still counts in the loss's denominator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import LossInputs
from siirl_dask.algorithms.packed import row_means, spread
from siirl_dask.algorithms.ratios import bounded

CorrectionFn = Callable[[LossInputs], Tensor]
"""The weight of each token's surrogate loss, [K]."""


def truncated_is(inputs: LossInputs, *, cap: float = 2.0) -> Tensor:
    """``min(w, cap)`` (TIS: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
    https://fengyao.notion.site/off-policy-rl). [K]. ValueError when ``cap`` is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"cap={cap}: expected more than 0")
    return bounded(_log_weight(inputs)).exp().clamp(max=cap)


def masked_is(inputs: LossInputs, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """w where it lies in [low, high], else 0 (IcePop, arXiv:2510.18855, section 2.3). [K].

    ValueError for an empty range.
    """
    _check_range(low, high)
    weight = bounded(_log_weight(inputs)).exp()
    return torch.where((weight < low) | (weight > high), torch.zeros_like(weight), weight)


def reject_sequences(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """1 for the tokens of rows whose geometric mean of w lies in [low, high], else 0 (Liu, Li et al., When Speed Kills
    Stability, https://richardli.xyz/rl-collapse). [K]. ValueError for an empty range.
    """
    _check_range(low, high)
    ratio = bounded(row_means(_log_weight(inputs), inputs.offsets)).exp()
    kept = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    return spread(torch.where(ratio.isnan(), ratio, kept), inputs.offsets)


def _log_weight(inputs: LossInputs) -> Tensor:
    return (inputs.old_logprobs - inputs.rollout_logprobs).detach()


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low={low}, high={high}: expected 0 <= low <= high")
