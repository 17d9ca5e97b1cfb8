from pathlib import Path

from siirl_dask.config import ModelConfig
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.testing.engines import EngineTests


class TestTransformersEngine(EngineTests):
    @classmethod
    def make_engine(cls, folder: Path) -> TransformersEngine:
        return TransformersEngine(ModelConfig(path=str(folder)), max_rows=50)
