"""The loss that a policy trains on: a surrogate, and the terms that go with any surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from siirl_dask.algorithms.correction import CorrectionFn
from siirl_dask.algorithms.kl import KLFn, k3
from siirl_dask.algorithms.losses import LossFn, LossInputs, TokenLoss
from siirl_dask.algorithms.packed import clamp_log_ratio


def policy_loss(
    inputs: LossInputs,
    *,
    surrogate: LossFn,
    kl: KLFn = k3,
    kl_coefficient: float = 0.0,
    kl_bias_correction: bool = False,
    entropy_coefficient: float = 0.0,
    correction: CorrectionFn | None = None,
) -> TokenLoss:
    """Return ``w surrogate + kl_coefficient kl(logp, reference) - entropy_coefficient entropy`` for
    each token. [K].

    The weights w come from ``correction``, and are 1 without one. ``kl`` gets log-ratios within
    +-20. ValueError when ``kl_coefficient`` is not 0 and there is no reference.

    ``kl_bias_correction`` multiplies the estimate of the KL by ``exp(logp - old)``, through which
    gradients flow (DeepSeek-V3.2, arXiv:2512.02556, equation 7): the old policy drew the tokens,
    the KL is the current one's. With k1 and k3 the estimate at each token and its gradient are then
    unbiased, given the tokens before it. Leave it off for k2 and ``straight_through``, whose own
    gradient is that of the KL as long as the policy is the old one.

    Metrics: the surrogate's; ``kl_to_sampler``, the k3 estimate of KL(sampler, current policy), in
    which differences of arithmetic and the updates since sampling add up; ``entropy``;
    ``reference_kl``, the k3 estimate, if there is a reference; ``correction_weight`` w, if there is
    a correction.
    """
    if kl_coefficient and inputs.reference_logprobs is None:
        raise ValueError(
            f"kl_coefficient={kl_coefficient} needs reference_logprobs, and there are none: add a "
            "node that runs siirl_dask.nodes:reference_logprobs, or set kl_coefficient to 0"
        )
    result = surrogate(inputs)
    loss = result.loss
    kl_to_sampler = _divergence(k3, inputs.rollout_logprobs, inputs.logprobs)
    metrics = {
        **result.metrics,
        "kl_to_sampler": kl_to_sampler.detach(),
        "entropy": inputs.entropy.detach(),
    }
    if correction is not None:
        weight = correction(inputs)
        metrics["correction_weight"] = weight.detach()
        loss = loss * weight
    if inputs.reference_logprobs is not None:
        reference_kl = _divergence(k3, inputs.logprobs, inputs.reference_logprobs)
        metrics["reference_kl"] = reference_kl.detach()
        if kl_coefficient:
            divergence = _divergence(kl, inputs.logprobs, inputs.reference_logprobs)
            if kl_bias_correction:
                log_ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs)
                divergence = divergence * log_ratio.exp()
            loss = loss + kl_coefficient * divergence
    if entropy_coefficient:
        loss = loss - entropy_coefficient * inputs.entropy
    return TokenLoss(loss=loss, metrics=metrics)


def _divergence(kl: KLFn, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(p, q) of log-probabilities whose difference is first clamped to +-20. [K], [K]
    -> [K].
    """
    difference = clamp_log_ratio(logprobs - reference)
    # an estimate depends on the difference alone
    return kl(difference, torch.zeros_like(difference))
