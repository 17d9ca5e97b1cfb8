"""Trainers that score and learn. ``build_trainer`` and ``build_reference`` are a role's ``build``."""

from __future__ import annotations

from siirl_dask.config import ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.training.trainer import PackedRows, TokenScores, TrainBatch, Trainer

__all__ = ["PackedRows", "TokenScores", "TrainBatch", "Trainer", "build_reference", "build_trainer"]


def build_trainer(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, rollout: RolloutConfig
) -> Trainer:
    """The policy that learns, one of ``rank.size`` equal ones. ConfigError when ``model.path`` cannot be loaded.

    Its log-probabilities are of the distribution that was sampled: at the rollout's temperature.
    """
    from siirl_dask.training.torch_trainer import TorchTrainer  # imports transformers

    return TorchTrainer(model, trainer, temperature=rollout.temperature, device=device.torch_name, rank=rank)


def build_reference(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, rollout: RolloutConfig
) -> Trainer:
    """The policy as it was at the start: it scores and never learns, so it has no gradients and no optimiser."""
    from siirl_dask.training.torch_trainer import TorchReference

    return TorchReference(model, trainer, temperature=rollout.temperature, device=device.torch_name)
