from pathlib import Path

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.testing.critics import CriticTests
from siirl_dask.training.torch_critic import TorchCritic


class TestTorchCritic(CriticTests):
    @classmethod
    def make_critic(cls, folder: Path, config: TrainerConfig, rank: Rank) -> TorchCritic:
        return TorchCritic(ModelConfig(path=str(folder)), config, rank=rank)
