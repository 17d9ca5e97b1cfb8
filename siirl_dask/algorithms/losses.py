"""Policy losses of packed response tokens: one number a token, so that who sums them over workers decides the mean.

Tokens that a mask leaves out and rows that are left out are gone before: a loss sees only what is learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from siirl_dask.algorithms.ratios import bounded, check_clip


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """The tokens of R rows that are learned from, row after row: K tokens.

    Gradients flow through ``logprobs`` and ``entropy``.
    """

    logprobs: Tensor
    """[K] current policy."""
    old_logprobs: Tensor
    """[K] policy before this step's update."""
    advantages: Tensor
    """[K]."""
    rollout_logprobs: Tensor
    """[K] as the engine that sampled reported them."""
    entropy: Tensor
    """[K] of the current policy, nats."""
    reference_logprobs: Tensor | None = None
    """[K] reference policy, when there is one."""
    offsets: Tensor
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none. A row is never split."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[K] each: further columns that the update was told to read."""


@dataclass(kw_only=True, slots=True)
class TokenLoss:
    """What a loss function gives. The trainer means the metrics over the mini-batch's tokens on all ranks, and sums the
    loss with the weights of an ``Aggregation``.
    """

    loss: Tensor
    """[K], with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[K] each, detached. The names must not depend on the rows: a rank without rows is asked for them too."""


LossFn = Callable[[LossInputs], TokenLoss]
"""The policy's loss, or the part of one (a surrogate) that says how advantages move probabilities."""


def policy_gradient(inputs: LossInputs) -> TokenLoss:
    """``-A logp``: REINFORCE (Williams 1992). It takes the policy for the one that sampled. No metrics."""
    return TokenLoss(loss=-inputs.advantages * inputs.logprobs)


def ppo_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, ``r = exp(logp - old)`` (PPO, arXiv:1707.06347).

    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv:2503.14476). ``dual_clip`` bounds the loss of tokens with
    A < 0 by ``-A dual_clip`` (arXiv:1912.09729; 3 there). ValueError when it is not above 1.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose loss is at a bound, so that they give no gradient.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip}: expected more than 1 (the paper has 3), or none")
    ratio = bounded(inputs.logprobs - inputs.old_logprobs).exp()
    result = clipped_loss(ratio, inputs.advantages, clip_low, clip_high)
    if dual_clip is None:
        return result
    ceiling = -inputs.advantages * dual_clip
    above = (inputs.advantages < 0) & (result.loss > ceiling)
    at_a_bound = result.metrics["clip_fraction"].bool() | above
    return TokenLoss(
        loss=torch.where(above, ceiling, result.loss),
        metrics={**result.metrics, "clip_fraction": at_a_bound.to(ratio.dtype)},
    )


def clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's loss of a given ratio, with ``ppo_clip``'s metrics. [K], [K] -> [K]. ValueError for bounds below 0."""
    check_clip(clip_low, clip_high)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (clipped > plain).to(ratio.dtype)}
    return TokenLoss(loss=torch.maximum(plain, clipped), metrics=metrics)
