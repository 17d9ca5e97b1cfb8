"""Conformance of policies and critics whose model is sharded (FSDP2)."""

from dataclasses import replace
from pathlib import Path

from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.critics import CriticTests
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training import Critic, Trainer
from tests.training.roles import critic, policy


class TestFsdpTrainer(TrainerTests):
    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        return policy(
            folder, replace(config, backend=Backend.fsdp), temperature=temperature, rank=rank
        )


class TestFsdpCritic(CriticTests):
    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> Critic:
        return critic(folder, replace(config, backend=Backend.fsdp), rank)
