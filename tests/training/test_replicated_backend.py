"""Conformance of policies and critics with the whole model on every worker."""

from pathlib import Path

from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.critics import CriticTests
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training import Critic, Trainer
from tests.training.roles import critic, policy


class TestReplicatedTrainer(TrainerTests):
    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        return policy(folder, config, temperature=temperature, rank=rank)


class TestReplicatedCritic(CriticTests):
    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> Critic:
        return critic(folder, config, rank)
