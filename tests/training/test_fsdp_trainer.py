from pathlib import Path

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.critics import CriticTests
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training.fsdp_trainer import FsdpCritic, FsdpTrainer


class TestFsdpTrainer(TrainerTests):
    @classmethod
    def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank) -> FsdpTrainer:
        return FsdpTrainer(ModelConfig(path=str(folder)), config, temperature=temperature, rank=rank)


class TestFsdpCritic(CriticTests):
    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> FsdpCritic:
        return FsdpCritic(ModelConfig(path=str(folder)), config, rank=rank)
