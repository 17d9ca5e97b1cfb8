"""Trainers that score and learn, and reward models. The ``build_...`` functions are a role's ``build``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from siirl_dask.config import Backend, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.planner import builds
from siirl_dask.training.preflight import check_critic, check_reference, check_reward_model, check_trainer
from siirl_dask.training.trainer import (
    Batch,
    Critic,
    PackedRows,
    RewardModel,
    TokenScores,
    TrainBatch,
    Trainer,
    ValueBatch,
)

if TYPE_CHECKING:
    from siirl_dask.training.parallel.backend import ModelBackend

__all__ = [
    "Batch",
    "Critic",
    "PackedRows",
    "RewardModel",
    "TokenScores",
    "TrainBatch",
    "Trainer",
    "ValueBatch",
    "build_critic",
    "build_reference",
    "build_reward_model",
    "build_trainer",
    "check_critic",
    "check_reference",
    "check_reward_model",
    "check_trainer",
]


@builds(preflight=check_trainer)
def build_trainer(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, rollout: RolloutConfig
) -> Trainer:
    """The policy that learns, one of ``rank.size`` that do so together. ConfigError when ``model.path`` cannot be used.

    Its log-probabilities are of the distribution that was sampled: at the rollout's temperature.
    """
    backend = _backend(device, rank, model, trainer)
    from siirl_dask.training.policy import Policy  # imports transformers

    return Policy(backend, model, trainer, rank, temperature=rollout.temperature)


@builds(preflight=check_reference)
def build_reference(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, rollout: RolloutConfig
) -> Trainer:
    """The policy as it was at the start: it scores and never learns, so it has no gradients and no optimiser."""
    backend = _backend(device, rank, model, trainer)
    from siirl_dask.training.policy import Reference

    return Reference(backend, model, temperature=rollout.temperature)


@builds(preflight=check_critic)
def build_critic(device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig) -> Critic:
    """A critic that begins as the model of ``model.path``, one of ``rank.size`` that learn together."""
    backend = _backend(device, rank, model, trainer)
    from siirl_dask.training.critic import ValueCritic

    return ValueCritic(backend, trainer, rank)


def _backend(device: Device, rank: Rank, model: ModelConfig, trainer: TrainerConfig) -> ModelBackend:
    hide()
    if trainer.backend == Backend.fsdp:
        from siirl_dask.training.parallel.fsdp import FsdpBackend

        return FsdpBackend(model, trainer, device=device.torch_name, rank=rank)
    from siirl_dask.training.parallel.backend import ReplicatedBackend

    return ReplicatedBackend(model, trainer, device=device.torch_name)


@builds(preflight=check_reward_model)
def build_reward_model(
    device: Device, rank: Rank, *, model: ModelConfig, max_tokens_per_batch: int = 16384
) -> RewardModel:
    """The scorer of sequences in ``model.path``; ``max_tokens_per_batch``, padding included, go through it at once.

    It reads the policy's tokens: its tokenizer must be the same. ConfigError when the folder cannot be used.
    """
    hide()
    from siirl_dask.training.reward_model import TorchRewardModel

    return TorchRewardModel(model, device=device.torch_name, budget=max_tokens_per_batch)
