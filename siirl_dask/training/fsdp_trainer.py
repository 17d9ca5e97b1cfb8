"""Policies whose model is in shards over the workers of their role."""

from __future__ import annotations

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.critic import ValueCritic
from siirl_dask.training.parallel.fsdp import ShardedModel
from siirl_dask.training.policy import Policy, Reference


class FsdpReference(Reference):
    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu", rank: Rank
    ) -> None:
        super().__init__(ShardedModel(model, trainer, device=device, rank=rank), model, temperature=temperature)


class FsdpTrainer(Policy):
    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu", rank: Rank
    ) -> None:
        placement = ShardedModel(model, trainer, device=device, rank=rank)
        super().__init__(placement, model, trainer, rank, temperature=temperature)


class FsdpCritic(ValueCritic):
    def __init__(self, model: ModelConfig, trainer: TrainerConfig, *, device: str = "cpu", rank: Rank) -> None:
        super().__init__(ShardedModel(model, trainer, device=device, rank=rank), trainer, rank)
