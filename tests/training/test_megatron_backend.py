"""Conformance of policies and critics of megatron-core, alone and as two replicas."""

from dataclasses import replace
from pathlib import Path

import pytest

from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.critics import CriticTests
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training import Critic, Trainer
from tests.training.roles import critic, policy

pytest.importorskip(
    "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
)


class TestMegatronTrainer(TrainerTests):
    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        return policy(
            folder, replace(config, backend=Backend.megatron), temperature=temperature, rank=rank
        )


class TestMegatronCritic(CriticTests):
    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> Critic:
        return critic(folder, replace(config, backend=Backend.megatron), rank)
