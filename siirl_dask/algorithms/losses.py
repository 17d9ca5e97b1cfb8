"""Policy losses of packed response tokens: one number a token, so that who sums them over workers decides the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from siirl_dask.algorithms.kl import k3

_MAX_LOG_RATIO = 20.0  # exp() of a sampler/trainer mismatch must not reach inf


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """The response tokens of R rows, row after row: K tokens. Gradients flow through ``logprobs`` and ``entropy``."""

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
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``. A row is never split."""


@dataclass(kw_only=True, slots=True)
class TokenLoss:
    """What a loss function gives: the trainer means all of it over the mini-batch's tokens on all ranks."""

    loss: Tensor
    """[K], with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[K] each, detached. The names must not depend on the rows: a rank without rows is asked for them too."""


LossFn = Callable[[LossInputs], TokenLoss]


def ppo_clip(inputs: LossInputs, *, clip_low: float, clip_high: float, kl_coefficient: float = 0.0) -> TokenLoss:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, ``r = exp(logp - old)`` (PPO, arXiv:1707.06347).

    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv:2503.14476). ``kl_coefficient`` adds that much of the k3
    estimate of KL(policy, reference), as GRPO does (arXiv:2402.03300).

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose clipped term is the larger, so that they give no gradient;
    ``kl_to_sampler``, the k3 estimate of KL(sampler, current policy): what the engine's arithmetic and the updates
    since the sampling amount to together; ``entropy``; and ``reference_kl`` when there is a reference.
    """
    if kl_coefficient > 0 and inputs.reference_logprobs is None:
        raise ValueError(f"kl_coefficient={kl_coefficient} needs reference_logprobs, and there are none")
    ratio = _bounded(inputs.logprobs - inputs.old_logprobs).exp()
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {
        "ratio": ratio.detach(),
        "clip_fraction": (clipped > plain).to(loss.dtype).detach(),
        "kl_to_sampler": _bounded_k3(inputs.rollout_logprobs, inputs.logprobs).detach(),
        "entropy": inputs.entropy.detach(),
    }
    if inputs.reference_logprobs is not None:
        reference_kl = _bounded_k3(inputs.logprobs, inputs.reference_logprobs)
        metrics["reference_kl"] = reference_kl.detach()
        if kl_coefficient > 0:
            loss = loss + kl_coefficient * reference_kl
    return TokenLoss(loss=loss, metrics=metrics)


def _bounded(log_ratio: Tensor) -> Tensor:
    """Clamped to +-20. What is not finite becomes nan, which the trainer refuses; a clamp would hide it."""
    bounded = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.where(log_ratio.isfinite(), bounded, torch.full_like(bounded, torch.nan))


def _bounded_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    difference = _bounded(logprobs - reference)
    return k3(difference, torch.zeros_like(difference))
