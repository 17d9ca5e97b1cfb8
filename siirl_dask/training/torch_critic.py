"""A critic in plain torch: the whole model on every worker."""

from __future__ import annotations

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.critic import ValueCritic
from siirl_dask.training.parallel.backend import WholeModel


class TorchCritic(ValueCritic):
    def __init__(self, model: ModelConfig, trainer: TrainerConfig, *, device: str = "cpu", rank: Rank) -> None:
        super().__init__(WholeModel(model, trainer, device=device), trainer, rank)
