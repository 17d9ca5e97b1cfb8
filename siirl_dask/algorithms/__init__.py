"""Advantages, losses and KL estimates: pure functions of tensors.

To add an algorithm, pass a function of your own with the same signature. There is no registry.
"""

from siirl_dask.algorithms.advantages import (
    AdvantageFn,
    Outcomes,
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    max_rl,
    opo,
    pass_at_k,
    remax,
    rloo,
)
from siirl_dask.algorithms.agent_advantages import AgentAdvantageFn, AgentOutcomes, dr_mas, hierarchical_grpo
from siirl_dask.algorithms.agent_losses import happo_clip, turn_clip
from siirl_dask.algorithms.aggregation import (
    Aggregation,
    Totals,
    segment_weights,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
)
from siirl_dask.algorithms.correction import (
    CorrectionFn,
    combined,
    mask_off_policy,
    masked_is,
    reject_divergent,
    reject_sequences,
    reject_tokens,
    truncated_is,
)
from siirl_dask.algorithms.covariance import clip_cov, covariances, kl_cov
from siirl_dask.algorithms.kl import (
    KLController,
    KLFn,
    abs_difference,
    build_kl_controller,
    k1,
    k2,
    k3,
    k3_clipped,
    straight_through,
)
from siirl_dask.algorithms.losses import LossFn, LossInputs, TokenLoss, policy_gradient, ppo_clip
from siirl_dask.algorithms.overlong import overlong_penalty
from siirl_dask.algorithms.packed import row_maxima, row_means, row_sums, spread
from siirl_dask.algorithms.policy_loss import policy_loss
from siirl_dask.algorithms.role_baselines import RoleBaselines, build_role_baselines
from siirl_dask.algorithms.similarity import nearest_distances, srpo_rewards
from siirl_dask.algorithms.surrogates import cispo, cpgd, dppo, gmpo, gspo, sapo, sequence_clip, vespo
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
from siirl_dask.algorithms.turn_advantages import gigpo, magrpo, mt_grpo, turn_returns
from siirl_dask.algorithms.turn_gae import marft, marft_tokens, turn_gae
from siirl_dask.algorithms.turn_outcomes import EpisodeRows, TurnAdvantageFn, TurnAdvantages, TurnOutcomes
from siirl_dask.algorithms.value_loss import ValueInputs, ValueLossFn, value_clip

__all__ = [
    "AdvantageFn",
    "AgentAdvantageFn",
    "AgentOutcomes",
    "Aggregation",
    "CorrectionFn",
    "EpisodeRows",
    "KLController",
    "KLFn",
    "LossFn",
    "LossInputs",
    "Outcomes",
    "RoleBaselines",
    "TokenAdvantageFn",
    "TokenAdvantages",
    "TokenLoss",
    "TokenOutcomes",
    "Totals",
    "TurnAdvantageFn",
    "TurnAdvantages",
    "TurnOutcomes",
    "ValueInputs",
    "ValueLossFn",
    "abs_difference",
    "build_kl_controller",
    "build_role_baselines",
    "cispo",
    "clip_cov",
    "combined",
    "covariances",
    "cpgd",
    "dppo",
    "dr_grpo",
    "dr_mas",
    "gae",
    "gdpo",
    "gigpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "happo_clip",
    "hierarchical_grpo",
    "k1",
    "k2",
    "k3",
    "k3_clipped",
    "kl_cov",
    "magrpo",
    "marft",
    "marft_tokens",
    "mask_off_policy",
    "masked_is",
    "max_rl",
    "moments",
    "mt_grpo",
    "nearest_distances",
    "opo",
    "overlong_penalty",
    "pass_at_k",
    "policy_gradient",
    "policy_loss",
    "ppo_clip",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reject_divergent",
    "reject_sequences",
    "reject_tokens",
    "remax",
    "rloo",
    "row_maxima",
    "row_means",
    "row_sums",
    "sapo",
    "segment_weights",
    "sequence_clip",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "spread",
    "srpo_rewards",
    "straight_through",
    "token_mean",
    "truncated_is",
    "turn_clip",
    "turn_gae",
    "turn_returns",
    "value_clip",
    "vespo",
    "whitened",
]
