"""Conformance of policies that see images: with the whole model on every worker, and with a
sharded one.
"""

from dataclasses import replace
from pathlib import Path

from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.image_rows import READ
from siirl_dask.testing.image_trainers import ImageTrainerTests
from siirl_dask.training import Trainer
from tests.training.roles import policy


class TestReplicatedImageTrainer(ImageTrainerTests):
    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        return policy(folder, config, temperature=temperature, rank=rank, images=READ)


class TestFsdpImageTrainer(ImageTrainerTests):
    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        config = replace(config, backend=Backend.fsdp)
        return policy(folder, config, temperature=temperature, rank=rank, images=READ)
