"""Parameters of a rank of the backend megatron, by arithmetic. Imports neither torch nor megatron-core."""

from __future__ import annotations

from siirl_dask.config import MegatronConfig
from siirl_dask.models.shapes import ModelSize


def on_one_rank(size: ModelSize, megatron: MegatronConfig) -> int:
    """Count the parameters of the rank that has most: of the layers of a stage, and of the embeddings at one end; of
    experts its share alone.
    """
    stages = megatron.pipeline_parallel
    rest = -(-(size.total - size.experts) // stages) + (size.largest if stages > 1 else 0)
    return -(-rest // megatron.tensor_parallel) + -(-size.experts // (stages * megatron.experts_over))
