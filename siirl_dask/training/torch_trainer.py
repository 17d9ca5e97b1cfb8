"""Plain torch: every worker holds the whole model and learns from its own rows; gradients are summed over workers."""

from __future__ import annotations

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.parallel.backend import WholeModel
from siirl_dask.training.policy import Policy, Reference


class TorchReference(Reference):
    def __init__(self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu") -> None:
        super().__init__(WholeModel(model, trainer, device=device), model, temperature=temperature)


class TorchTrainer(Policy):
    """Its ranks stay equal to the last bit."""

    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu", rank: Rank
    ) -> None:
        placement = WholeModel(model, trainer, device=device)
        super().__init__(placement, model, trainer, rank, temperature=temperature)
