"""Parameters of a rank of the backend megatron, by arithmetic. Imports neither torch nor megatron-core."""

from __future__ import annotations

from siirl_dask.config import MegatronConfig
from siirl_dask.models.shapes import ModelSize


def on_one_rank(size: ModelSize, megatron: MegatronConfig) -> int:
    """Count the parameters of the rank that has most: of the layers of a stage, and of the embeddings at one end; of
    experts its share alone.
    """
    return sum(_of_rank(size, megatron))


def stepped_on_one_rank(size: ModelSize, megatron: MegatronConfig, ranks: int) -> int:
    """Count, of the rank that has most, the parameters whose optimizer state it holds: all of its own, or with
    ``distributed_optimizer`` at most an even share of them and the largest one, which is not divided.
    """
    rest, experts = _of_rank(size, megatron)
    of_stage = ranks // megatron.pipeline_parallel
    holders = of_stage // megatron.tensor_parallel
    same_experts = of_stage // megatron.experts_over
    if not megatron.distributed_optimizer or holders == 1:
        return rest + experts
    stepped = min(rest, -(-rest // holders) + -(-size.largest // megatron.tensor_parallel))
    if not experts:
        return stepped
    of_layer = -(-size.layer // megatron.experts_over)  # the experts of a layer are two parameters
    return stepped + min(experts, -(-experts // same_experts) + of_layer)


def _of_rank(size: ModelSize, megatron: MegatronConfig) -> tuple[int, int]:
    """Return the parameters of the rank that has most, without experts, and of its experts."""
    stages = megatron.pipeline_parallel
    rest = -(-(size.total - size.experts) // stages) + (size.largest if stages > 1 else 0)
    return -(-rest // megatron.tensor_parallel), -(-size.experts // (stages * megatron.experts_over))
