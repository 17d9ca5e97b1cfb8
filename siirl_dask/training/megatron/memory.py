"""Parameters and bytes of a rank of the backend megatron, by arithmetic. Imports neither torch
nor megatron-core.
"""

from __future__ import annotations

from dataclasses import replace

from siirl_dask.config import MegatronConfig, TrainerConfig
from siirl_dask.models.shapes import ModelSize
from siirl_dask.training.memory import (
    FLOAT32,
    GRADIENTS,
    IN_FLOAT32,
    ModelOnWorkers,
    activation_bytes,
    head_bytes,
)


def parameters(size: ModelSize, trainer: TrainerConfig) -> int:
    """Count the parameters of a replica, as if each rank had as many as the one with most."""
    return trainer.megatron.shards * on_one_rank(size, trainer.megatron)


def stepped_elsewhere(size: ModelSize, trainer: TrainerConfig, ranks: int) -> int:
    """Count, of the rank that has most, the parameters whose optimizer state other replicas
    hold.
    """
    return on_one_rank(size, trainer.megatron) - stepped_on_one_rank(size, trainer.megatron, ranks)


def held(model: ModelOnWorkers) -> dict[str, int]:
    """Return the bytes that a rank holds, by part. In bfloat16 the stage computes with copies of
    the weights that learn; what only scores has no others.
    """
    own = on_one_rank(model.size, model.trainer.megatron)
    narrow = model.narrow < FLOAT32
    parts = {}
    if narrow:
        parts = {"weights in bfloat16": model.narrow * own}
    if model.learns or not narrow:
        parts[f"weights{IN_FLOAT32}"] = FLOAT32 * own
    if model.learns:
        stepped = stepped_on_one_rank(model.size, model.trainer.megatron, model.ranks)
        parts |= {GRADIENTS: FLOAT32 * own, "optimizer state": 2 * FLOAT32 * stepped}
        parts |= {"moving average": FLOAT32 * stepped} if model.trainer.keeps_average else {}
    return parts


def moments(model: ModelOnWorkers) -> list[dict[str, int]]:
    """Return the bytes of a pass on the last stage and on the first one, by part.

    The first of p stages keeps the activations of p micro-batches, and of (p - 1) / v more with v
    runs of layers (arXiv:2205.05198, section 4.2.3); the last one those of one, and has the head.
    """
    stages = model.trainer.megatron.pipeline_parallel
    one = model.architecture
    runs = model.trainer.megatron.virtual_pipeline
    most = stages + (-(-(stages - 1) // runs) if runs > 1 else 0)
    stage = replace(model, architecture=replace(one, layers=-(-one.layers // stages)))
    each = activation_bytes(stage) * model.tokens
    label = f"activations of {model.tokens:,} tokens"
    last = {label: each, **_head(model)}
    if stages == 1:
        return [last]
    return [last, {f"{label}, {most} times": each * (most if model.learns else 1)}]


def _head(model: ModelOnWorkers) -> dict[str, int]:
    """Return what log-probs take. Ranks that share the vocabulary have the logits, log-probs, their
    exponentials and gradient of their part of it at once.
    """
    split = model.trainer.megatron.tensor_parallel
    if split == 1 or not model.scores:
        return head_bytes(model)
    numbers = model.tokens * model.architecture.vocabulary // split
    each = 4 * FLOAT32 + model.narrow % FLOAT32 if model.learns else 3 * FLOAT32
    return {"log-probs of a part of the vocabulary": each * numbers}


def on_one_rank(size: ModelSize, megatron: MegatronConfig) -> int:
    """Count the parameters of the rank that has most: of the layers of a stage, and of the
    embeddings at one end; of experts its share alone.
    """
    return sum(_of_rank(size, megatron))


def stepped_on_one_rank(size: ModelSize, megatron: MegatronConfig, ranks: int) -> int:
    """Count, of the rank that has most, the parameters whose optimizer state it holds: all of its
    own, or with ``distributed_optimizer`` at most an even share of them and the largest one, which
    is not divided.
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
    return -(-rest // megatron.tensor_parallel), -(
        -size.experts // (stages * megatron.experts_over)
    )
