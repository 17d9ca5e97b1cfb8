"""Configurations of TRL's loss and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from siirl_dask.algorithms import (
    Aggregation,
    LossFn,
    cispo,
    gspo,
    k3,
    policy_loss,
    ppo_clip,
    sequence_mean_token_mean,
    sequence_mean_token_sum_norm,
    token_mean,
)

MAX_RESPONSE = 16  # tokens
_BETA = 0.04  # as in arXiv:2402.03300


@dataclass(frozen=True, slots=True)
class Case:
    """One loss, said twice."""

    name: str
    trl: Mapping[str, object]
    """Arguments of ``GRPOConfig``."""
    loss: LossFn
    aggregate: Aggregation
    ours: str
    """``loss`` and ``aggregate`` in words."""
    micro_batches: int = 1
    """Micro-batches over which both accumulate the gradient of one update."""
    minibatches: int = 1
    """Number of mini-batches that the samples are cut into; the update learns from the first."""
    differs: str = ""
    """Why the definitions are not the same, where they are not."""


def cases() -> list[Case]:
    """Return the cases: first the losses that both libraries define alike, then those that
    differ.
    """
    return [*_plain(), *_with_a_reference(), *_with_more(), *_in_parts()]


def _plain() -> list[Case]:
    clip, higher = (
        partial(ppo_clip, clip_low=0.2, clip_high=0.2),
        partial(ppo_clip, clip_low=0.2, clip_high=0.28),
    )
    asymmetric = {"epsilon": 0.2, "epsilon_high": 0.28}
    whole = partial(sequence_mean_token_sum_norm, length=MAX_RESPONSE)
    return [
        Case(
            "grpo",
            {"loss_type": "grpo"},
            clip,
            sequence_mean_token_mean,
            "ppo_clip 0.2, sequence_mean_token_mean",
        ),
        Case(
            "dapo",
            {"loss_type": "dapo", **asymmetric},
            higher,
            token_mean,
            "ppo_clip 0.2/0.28, token_mean",
        ),
        Case(
            "bnpo",
            {"loss_type": "bnpo", **asymmetric},
            higher,
            token_mean,
            "ppo_clip 0.2/0.28, token_mean",
        ),
        Case(
            "dr_grpo",
            {"loss_type": "dr_grpo", "scale_rewards": "none"},
            clip,
            whole,
            "ppo_clip 0.2, sequence_mean_token_sum_norm",
        ),
        Case(
            "cispo",
            {"loss_type": "cispo", "epsilon_high": 1.28},
            partial(cispo, clip_low=1.0, clip_high=0.28),
            token_mean,
            "cispo 1/0.28, token_mean",
        ),
        Case(
            "gspo",
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
            gspo,
            sequence_mean_token_mean,
            "gspo, sequence_mean_token_mean",
        ),
        Case(
            "gspo, clipping that seldom bites",
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 0.2,
                "epsilon_high": 0.2,
            },
            partial(gspo, clip_low=0.2, clip_high=0.2),
            sequence_mean_token_mean,
            "gspo 0.2, sequence_mean_token_mean",
        ),
    ]


def _with_a_reference() -> list[Case]:
    clip, higher = (
        partial(ppo_clip, clip_low=0.2, clip_high=0.2),
        partial(ppo_clip, clip_low=0.2, clip_high=0.28),
    )
    asymmetric = {"epsilon": 0.2, "epsilon_high": 0.28}
    plain = {"beta": _BETA, "use_bias_correction_kl": False}
    corrected = {"beta": _BETA, "use_bias_correction_kl": True}
    return [
        Case(
            "grpo, beta 0.04",
            {"loss_type": "grpo", **plain},
            partial(policy_loss, surrogate=clip, kl=k3, kl_coefficient=_BETA),
            sequence_mean_token_mean,
            "kl k3, kl_coefficient 0.04",
        ),
        Case(
            "dapo, beta 0.04",
            {"loss_type": "dapo", **asymmetric, **plain},
            partial(policy_loss, surrogate=higher, kl=k3, kl_coefficient=_BETA),
            token_mean,
            "kl k3, kl_coefficient 0.04",
        ),
        Case(
            "cispo, beta 0.04",
            {"loss_type": "cispo", "epsilon_high": 1.28, **plain},
            partial(
                policy_loss,
                surrogate=partial(cispo, clip_low=1.0, clip_high=0.28),
                kl=k3,
                kl_coefficient=_BETA,
            ),
            token_mean,
            "kl k3, kl_coefficient 0.04",
        ),
        Case(
            "grpo, beta 0.04, use_bias_correction_kl",
            {"loss_type": "grpo", **corrected},
            partial(
                policy_loss, surrogate=clip, kl=k3, kl_coefficient=_BETA, kl_bias_correction=True
            ),
            sequence_mean_token_mean,
            "kl k3, kl_coefficient 0.04, kl_bias_correction",
        ),
    ]


def _with_more() -> list[Case]:
    higher = partial(ppo_clip, clip_low=0.2, clip_high=0.28)
    return [
        Case(
            "grpo, delta 1.5",
            {"loss_type": "grpo", "delta": 1.5},
            partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=1.5),
            sequence_mean_token_mean,
            "ppo_clip 0.2 with dual_clip 1.5",
        ),
        Case(
            "dapo, entropy_coef 0.01",
            {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "entropy_coef": 0.01},
            partial(policy_loss, surrogate=higher, entropy_coefficient=0.01),
            token_mean,
            "entropy_coefficient 0.01",
        ),
    ]


def _in_parts() -> list[Case]:
    clip = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
    own = "as above, in micro-batches"
    return [
        Case(
            "grpo in 4 micro-batches",
            {"loss_type": "grpo"},
            clip,
            sequence_mean_token_mean,
            own,
            micro_batches=4,
        ),
        Case(
            "dapo in 4 micro-batches", {"loss_type": "dapo"}, clip, token_mean, own, micro_batches=4
        ),
        Case(
            "bnpo in 4 micro-batches",
            {"loss_type": "bnpo"},
            clip,
            token_mean,
            own,
            micro_batches=4,
            differs=(
                "TRL means each micro-batch's tokens, then the micro-batches; here micro-batches "
                "change nothing"
            ),
        ),
        Case(
            "dapo, first of 4 mini-batches",
            {"loss_type": "dapo"},
            clip,
            token_mean,
            "token_mean",
            minibatches=4,
            differs=(
                "TRL divides by a quarter of all tokens generated, token_mean by those of the "
                "mini-batch"
            ),
        ),
    ]
