"""Clip-Cov and KL-Cov (arXiv:2505.22617).

A few tokens, whose log-probability and advantage rise together, drive most of the loss of entropy.
Both surrogates treat these covariant tokens apart from the others.

A node chooses them once a step, from the log-probabilities before the update, over the mini-batches
of all workers, and passes them on as the column ``covariant``. So the choice does not depend on
micro-batches or on the number of workers. The paper chooses again in each mini-batch, by the
current policy; in the first mini-batch that is the same choice.
"""

from __future__ import annotations

from torch import Tensor

from siirl_dask.algorithms.losses import LossInputs, TokenLoss, ppo_clip
from siirl_dask.algorithms.packed import clamp_log_ratio

_COVARIANT = "covariant"


def covariances(
    logprobs: Tensor,
    advantages: Tensor,
    mean_logprob: float,
    mean_advantage: float,
) -> Tensor:
    """Return each token's ``(logp - mean logp) (A - mean A)``, whose mean over all tokens is the
    covariance of both. [K], [K] -> [K].

    KL-Cov chooses the highest 2e-4 of all tokens; Clip-Cov draws as many at random among those
    between 1 and 5.
    """
    return (logprobs - mean_logprob) * (advantages - mean_advantage)


def clip_cov(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 1.0) -> TokenLoss:
    """Leave the covariant tokens out of ``ppo_clip``: their loss is 0, and they still count in
    means over tokens. [K].

    The default bounds are those of the authors' runs. ValueError without the column ``covariant``,
    [K] bool.

    Metrics: ``ratio`` and ``clip_fraction`` as in ``ppo_clip``; ``covariant``, the tokens left out.
    """
    covariant = _covariant(inputs, "clip_cov")
    result = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(
        loss=result.loss * (1 - covariant), metrics={**result.metrics, _COVARIANT: covariant}
    )


def kl_cov(inputs: LossInputs, *, coefficient: float = 0.1) -> TokenLoss:
    """Add a KL penalty at the covariant tokens: ``-A r + coefficient |logp - old|`` there and ``-A
    r`` elsewhere, with ``r = exp(logp - old)``. [K].

    The penalty is the one in the authors' code. ValueError without the column ``covariant``, [K]
    bool.

    Metrics: ``ratio`` r; ``covariant``, the tokens with a penalty.
    """
    covariant = _covariant(inputs, "kl_cov")
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs)
    ratio = log_ratio.exp()
    loss = -inputs.advantages * ratio + coefficient * covariant * log_ratio.abs()
    return TokenLoss(loss=loss, metrics={"ratio": ratio.detach(), _COVARIANT: covariant})


def _covariant(inputs: LossInputs, name: str) -> Tensor:
    """Return 1 for covariant tokens and 0 for all others, [K]; ``name`` is the surrogate that an
    error names.
    """
    if _COVARIANT not in inputs.columns:
        raise ValueError(
            f"{name} needs the column {_COVARIANT!r} (there are: {sorted(inputs.columns)}): add a "
            "node that runs siirl_dask.nodes:choose_covariant before the update, and columns: "
            f"[{_COVARIANT}] to the update"
        )
    return inputs.columns[_COVARIANT].to(inputs.old_logprobs.dtype)
