from pathlib import Path

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training.torch_trainer import TorchTrainer


class TestTorchTrainer(TrainerTests):
    @classmethod
    def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank) -> TorchTrainer:
        return TorchTrainer(ModelConfig(path=str(folder)), config, temperature=temperature, rank=rank)
