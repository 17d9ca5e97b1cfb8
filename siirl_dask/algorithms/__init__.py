"""Advantages, losses and KL estimates: pure functions of tensors.

To add an algorithm, pass a function of your own with the same signature. There is no registry.
"""

from siirl_dask.algorithms.advantages import AdvantageFn, Outcomes, dr_grpo, gpg, grpo, opo, pass_at_k, remax, rloo
from siirl_dask.algorithms.aggregation import (
    Aggregation,
    Totals,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
)
from siirl_dask.algorithms.correction import CorrectionFn, masked_is, reject_sequences, truncated_is
from siirl_dask.algorithms.covariance import clip_cov, covariances, kl_cov
from siirl_dask.algorithms.kl import (
    KLController,
    KLFn,
    abs_difference,
    build_kl_controller,
    k1,
    k2,
    k3,
    straight_through,
)
from siirl_dask.algorithms.losses import LossFn, LossInputs, TokenLoss, policy_gradient, ppo_clip
from siirl_dask.algorithms.overlong import overlong_penalty
from siirl_dask.algorithms.packed import row_means, row_sums, spread
from siirl_dask.algorithms.policy_loss import policy_loss
from siirl_dask.algorithms.surrogates import cispo, cpgd, gmpo, gspo, sapo, sequence_clip
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
from siirl_dask.algorithms.value_loss import ValueInputs, ValueLossFn, value_clip

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
    "abs_difference",
    "build_kl_controller",
    "cispo",
    "clip_cov",
    "covariances",
    "cpgd",
    "dr_grpo",
    "gae",
    "gmpo",
    "gpg",
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
    "sapo",
    "sequence_clip",
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
