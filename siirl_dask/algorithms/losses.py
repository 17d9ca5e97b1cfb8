"""Policy losses of packed response tokens, one number per token: the caller decides how tokens are
averaged.

Masked tokens, and rows without an advantage, are removed beforehand: a loss sees only tokens that
it trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from siirl_dask.algorithms.packed import check_clip, clamp_log_ratio


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """The K tokens of R rows that a policy's loss trains on, row after row.

    Gradients flow through ``logprobs`` and ``entropy``.
    """

    logprobs: Tensor
    """[K] log-probabilities under the current policy."""
    old_logprobs: Tensor
    """[K] log-probabilities under the policy before this step's update."""
    advantages: Tensor
    """[K] advantages; a response's advantage is repeated for each of its tokens."""
    rollout_logprobs: Tensor
    """[K] log-probabilities as the engine that sampled reported them."""
    entropy: Tensor
    """[K] entropy of the current policy at each token, in nats."""
    reference_logprobs: Tensor | None = None
    """[K] log-probabilities under the reference policy; None when no node computed them."""
    offsets: Tensor
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none. No
    row is ever split."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Further columns, [K] each, by the names that the update's ``columns`` option lists."""


@dataclass(kw_only=True, slots=True)
class TokenLoss:
    """The result of a loss function.

    The trainer sums the loss with the weights of an ``Aggregation``, and averages each metric over
    the mini-batch's tokens on all ranks.
    """

    loss: Tensor
    """[K] loss of each token, with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Metrics by name, [K] each, detached. The names must not depend on the rows: a rank without
    rows reports the same ones.
    """


LossFn = Callable[[LossInputs], TokenLoss]
"""``LossInputs -> TokenLoss``: a policy's loss, or its surrogate, the part that moves
probabilities by advantages."""


def policy_gradient(inputs: LossInputs) -> TokenLoss:
    """Return ``-A logp`` (REINFORCE, Williams 1992), as if the current policy had sampled. [K].
    No metrics.
    """
    return TokenLoss(loss=-inputs.advantages * inputs.logprobs)


def ppo_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Return ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, ``r = exp(logp - old)`` (PPO,
    arXiv:1707.06347). [K].

    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv:2503.14476). ``dual_clip`` bounds the loss
    of tokens with A < 0 by ``-A dual_clip`` (arXiv:1912.09729; 3 there). ValueError when it is not
    above 1, for other bounds below 0 and for ``clip_low`` above 1.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose loss is at a bound of the ratio; with
    ``dual_clip``, ``dual_clip_fraction``, tokens whose loss is at that bound. No token is at both,
    and one at either has no gradient.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip}: expected more than 1 (the paper has 3), or none")
    ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs).exp()
    result = clipped_loss(ratio, inputs.advantages, clip_low, clip_high)
    if dual_clip is None:
        return result
    ceiling = -inputs.advantages * dual_clip
    above = (inputs.advantages < 0) & (result.loss > ceiling)
    return TokenLoss(
        loss=torch.where(above, ceiling, result.loss),
        metrics={**result.metrics, "dual_clip_fraction": above.to(ratio.dtype)},
    )


def clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """Return PPO's clipped loss of any ratio, with the metrics ``ratio`` and ``clip_fraction``.
    [K], [K] -> [K].

    ValueError for bounds below 0 and for ``clip_low`` above 1.
    """
    check_clip(clip_low, clip_high)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (clipped > unclipped).to(ratio.dtype)}
    return TokenLoss(loss=torch.maximum(unclipped, clipped), metrics=metrics)
