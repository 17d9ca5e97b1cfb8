"""Advantages, losses and KL estimates: pure functions of tensors. Passing one is the extension point: no registry."""

from siirl_dask.algorithms.advantages import AdvantageFn, Outcomes, dr_grpo, grpo, opo, pass_at_k, remax, rloo
from siirl_dask.algorithms.aggregation import (
    Aggregation,
    Totals,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
)
from siirl_dask.algorithms.cispo import cispo
from siirl_dask.algorithms.correction import CorrectionFn, masked_is, reject_sequences, truncated_is
from siirl_dask.algorithms.covariance import clip_cov, covariances, kl_cov
from siirl_dask.algorithms.cpgd import cpgd
from siirl_dask.algorithms.kl import KLFn, absolute, k1, k2, k3, straight_through
from siirl_dask.algorithms.kl_control import KLController, build_kl_controller
from siirl_dask.algorithms.losses import LossFn, LossInputs, TokenLoss, policy_gradient, ppo_clip
from siirl_dask.algorithms.packed import row_means, row_sums, spread
from siirl_dask.algorithms.policy import policy_loss
from siirl_dask.algorithms.sequence import gmpo, gspo
from siirl_dask.algorithms.shaping import overlong_penalty
from siirl_dask.algorithms.token_advantages import (
    TokenAdvantageFn,
    TokenAdvantages,
    TokenOutcomes,
    gae,
    moments,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whitened,
)
from siirl_dask.algorithms.values import ValueInputs, ValueLossFn, value_clip

__all__ = [
    "AdvantageFn",
    "Aggregation",
    "CorrectionFn",
    "KLController",
    "KLFn",
    "LossFn",
    "LossInputs",
    "Outcomes",
    "TokenAdvantageFn",
    "TokenAdvantages",
    "TokenLoss",
    "TokenOutcomes",
    "Totals",
    "ValueInputs",
    "ValueLossFn",
    "absolute",
    "build_kl_controller",
    "cispo",
    "clip_cov",
    "covariances",
    "cpgd",
    "dr_grpo",
    "gae",
    "gmpo",
    "grpo",
    "gspo",
    "k1",
    "k2",
    "k3",
    "kl_cov",
    "masked_is",
    "moments",
    "opo",
    "overlong_penalty",
    "pass_at_k",
    "policy_gradient",
    "policy_loss",
    "ppo_clip",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reject_sequences",
    "remax",
    "rloo",
    "row_means",
    "row_sums",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "spread",
    "straight_through",
    "token_mean",
    "truncated_is",
    "value_clip",
    "whitened",
]
