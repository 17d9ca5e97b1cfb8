"""Conformance of policies that see images: with the whole model on every worker, and with a
sharded one.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.images.families import VlmFamily
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
    @pytest.fixture(
        params=[pytest.param("qwen2_vl", marks=pytest.mark.sweep), "qwen2_5_vl", "qwen3_vl"]
    )
    def folder(self, folders: dict[VlmFamily, Path], request: pytest.FixtureRequest) -> Path:
        """Shards of two families: the third one is trained whole above."""
        return folders[request.param]

    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        config = replace(config, backend=Backend.fsdp)
        return policy(folder, config, temperature=temperature, rank=rank, images=READ)
