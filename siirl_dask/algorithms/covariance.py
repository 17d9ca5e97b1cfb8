"""Clip-Cov and KL-Cov (arXiv:2505.22617): the few tokens whose log-probability goes most with their advantage are what
takes the policy's entropy away, and are treated apart.

They are chosen once a step, from the log-probabilities before the update, over the mini-batches of all workers, and
arrive as the column ``covariant``: so the choice does not depend on micro-batches or on the number of workers. The
paper chooses by the current policy in each mini-batch, which in the first is the same.
"""

from __future__ import annotations

from torch import Tensor

from siirl_dask.algorithms.losses import LossInputs, TokenLoss, ppo_clip
from siirl_dask.algorithms.ratios import bounded

_COVARIANT = "covariant"


def covariances(logprobs: Tensor, advantages: Tensor, mean_logprob: float, mean_advantage: float) -> Tensor:
    """``(logp - mean logp) (A - mean A)``, of which the mean over all tokens is their covariance. [K], [K] -> [K].

    kl-cov takes the highest 2e-4 of all tokens, clip-cov as many drawn at random among those between 1 and 5.
    """
    return (logprobs - mean_logprob) * (advantages - mean_advantage)


def clip_cov(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 1.0) -> TokenLoss:
    """``ppo_clip`` without the covariant tokens: their loss is 0, and they count in means over tokens.

    The bounds are those of the authors' runs. ValueError without the column ``covariant``, [K] bool.

    Metrics: ``ratio``, ``clip_fraction``, as of ``ppo_clip``; ``covariant``, the tokens that are left out.
    """
    covariant = _covariant(inputs, "clip_cov")
    result = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(loss=result.loss * (1 - covariant), metrics={**result.metrics, _COVARIANT: covariant})


def kl_cov(inputs: LossInputs, *, coefficient: float = 0.1) -> TokenLoss:
    """``-A r``, ``r = exp(logp - old)``, plus ``coefficient |logp - old|`` at the covariant tokens: the KL as the
    authors' code has it. ValueError without the column ``covariant``, [K] bool.

    Metrics: ``ratio`` r; ``covariant``, the tokens that pay.
    """
    covariant = _covariant(inputs, "kl_cov")
    log_ratio = bounded(inputs.logprobs - inputs.old_logprobs)
    ratio = log_ratio.exp()
    loss = -inputs.advantages * ratio + coefficient * covariant * log_ratio.abs()
    return TokenLoss(loss=loss, metrics={"ratio": ratio.detach(), _COVARIANT: covariant})


def _covariant(inputs: LossInputs, name: str) -> Tensor:
    """[K], 1 for covariant tokens and 0 for others."""
    if _COVARIANT not in inputs.columns:
        raise ValueError(
            f"{name} needs the column {_COVARIANT!r} (there are: {sorted(inputs.columns)}): add a node that runs "
            f"siirl_dask.nodes:choose_covariant before the update, and columns: [{_COVARIANT}] to the update"
        )
    return inputs.columns[_COVARIANT].to(inputs.old_logprobs.dtype)
