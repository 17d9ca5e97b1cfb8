"""Policies, references, critics and reward models. Each ``build_...`` function is a role's ``build``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from siirl_dask.config import Backend, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.cache import local_model
from siirl_dask.planner import builds
from siirl_dask.training.preflight import (
    check_critic,
    check_reference,
    check_reward_model,
    check_trainer,
    trainer_groups,
)
from siirl_dask.training.trainer import (
    Batch,
    Critic,
    NonFinite,
    OnNonFinite,
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
    "NonFinite",
    "OnNonFinite",
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


@builds(preflight=check_trainer, groups=trainer_groups)
def build_trainer(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, rollout: RolloutConfig
) -> Trainer:
    """Build a policy that learns, one of ``rank.size`` that learn together. ConfigError if ``model.path`` is unusable.

    Log-probs are taken at the rollout's temperature, so they describe the distribution that was sampled.
    """
    backend = _backend(device, rank, model, trainer)
    from siirl_dask.training.policy import Policy  # imports transformers

    with device.stage("the loading of weights"):
        park = _parks(trainer, device)
        return Policy(backend, model, trainer, rank, temperature=rollout.temperature, park=park, waiting=device.waiting)


@builds(preflight=check_reference, groups=trainer_groups)
def build_reference(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, rollout: RolloutConfig
) -> Trainer:
    """Build the policy as it was at the start. A reference scores and never learns: no gradients, no optimizer."""
    backend = _backend(device, rank, model, trainer)
    from siirl_dask.training.policy import Reference

    with device.stage("the loading of weights"):
        return Reference(backend, model, temperature=rollout.temperature, park=_parks(trainer, device))


@builds(preflight=check_critic, groups=trainer_groups)
def build_critic(device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig) -> Critic:
    """Build a critic that begins as the model in ``model.path``, one of ``rank.size`` that learn together."""
    backend = _backend(device, rank, model, trainer)
    from siirl_dask.training.critic import ValueCritic

    with device.stage("the loading of weights"):
        return ValueCritic(backend, trainer, rank, park=_parks(trainer, device), waiting=device.waiting)


def _parks(trainer: TrainerConfig, device: Device) -> bool:
    """Return whether the model can wait in the host's memory: on a CPU it is always there."""
    return trainer.park and device.kind is not DeviceKind.CPU


def _backend(device: Device, rank: Rank, model: ModelConfig, trainer: TrainerConfig) -> ModelBackend:
    hide()
    model = local_model(model, device)
    if trainer.backend == Backend.fsdp:
        from siirl_dask.training.parallel.fsdp import FsdpBackend

        return FsdpBackend(model, trainer, device=device.torch_name, rank=rank, progress=device.progress)
    from siirl_dask.training.parallel.backend import ReplicatedBackend

    return ReplicatedBackend(model, trainer, device=device.torch_name, progress=device.progress)


@builds(preflight=check_reward_model)
def build_reward_model(
    device: Device, rank: Rank, *, model: ModelConfig, max_tokens_per_batch: int = 16384
) -> RewardModel:
    """Build the sequence classifier in ``model.path``. A batch holds ``max_tokens_per_batch`` tokens, padding included.

    The model reads the policy's token ids, so both need the same tokenizer. ConfigError if the folder is unusable.
    """
    hide()
    from siirl_dask.training.reward_model import TorchRewardModel

    model = local_model(model, device)
    with device.stage("the loading of weights"):
        return TorchRewardModel(model, device=device.torch_name, budget=max_tokens_per_batch, progress=device.progress)
