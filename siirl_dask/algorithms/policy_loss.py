"""The loss a policy is trained on: a surrogate, and what is added to any."""

from __future__ import annotations

import torch
from torch import Tensor

from siirl_dask.algorithms.correction import CorrectionFn
from siirl_dask.algorithms.kl import KLFn, k3
from siirl_dask.algorithms.losses import LossFn, LossInputs, TokenLoss
from siirl_dask.algorithms.ratios import bounded


def policy_loss(
    inputs: LossInputs,
    *,
    surrogate: LossFn,
    kl: KLFn = k3,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    correction: CorrectionFn | None = None,
) -> TokenLoss:
    """``w surrogate + kl_coefficient kl(logp, reference) - entropy_coefficient entropy``, token by token.

    w are the ``correction``'s weights, 1 without one. ``kl`` gets log-ratios within +-20. ValueError when
    ``kl_coefficient`` is not 0 and there is no reference.

    Metrics: the surrogate's; ``kl_to_sampler``, the k3 estimate of KL(sampler, current policy): what the engine's
    arithmetic and the updates since the sampling amount to together; ``entropy``; ``reference_kl``, k3, when there is a
    reference; ``correction_weight`` w, when there is a correction.
    """
    if kl_coefficient and inputs.reference_logprobs is None:
        raise ValueError(
            f"kl_coefficient={kl_coefficient} needs reference_logprobs, and there are none: add a node that runs "
            "siirl_dask.nodes:reference_logprobs, or set kl_coefficient to 0"
        )
    result = surrogate(inputs)
    loss = result.loss
    metrics = {
        **result.metrics,
        "kl_to_sampler": _divergence(k3, inputs.rollout_logprobs, inputs.logprobs).detach(),
        "entropy": inputs.entropy.detach(),
    }
    if correction is not None:
        weight = correction(inputs)
        metrics["correction_weight"] = weight.detach()
        loss = loss * weight
    if inputs.reference_logprobs is not None:
        metrics["reference_kl"] = _divergence(k3, inputs.logprobs, inputs.reference_logprobs).detach()
        if kl_coefficient:
            loss = loss + kl_coefficient * _divergence(kl, inputs.logprobs, inputs.reference_logprobs)
    if entropy_coefficient:
        loss = loss - entropy_coefficient * inputs.entropy
    return TokenLoss(loss=loss, metrics=metrics)


def _divergence(kl: KLFn, logprobs: Tensor, reference: Tensor) -> Tensor:
    difference = bounded(logprobs - reference)
    return kl(difference, torch.zeros_like(difference))
