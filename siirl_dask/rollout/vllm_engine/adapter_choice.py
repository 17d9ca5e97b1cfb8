"""Decides whether vLLM computes with adapters in layers of its own, or gets weights with the
adapters merged in.
"""

from __future__ import annotations

from siirl_dask.config import Dtype, LoraConfig, RolloutConfig

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
MOST = _RANKS[-1]
"""Largest rank of an adapter in vLLM's layers."""


def takes_layers(
    dtype: Dtype,
    rollout: RolloutConfig,
    lora: LoraConfig | None,
    *,
    on_cpu: bool,
) -> bool:
    """Return whether vLLM has layers for the adapters.

    Its layers copy an adapter for each token on a CPU, and on an accelerator their kernels know no
    float32; a visual tower has none. There the weights are merged, unless
    ``rollout.vllm.engine_kwargs.enable_lora`` says otherwise.
    """
    if lora is None or not lora.rank:
        return False
    in_tower = any(target.split(".")[0] == "visual" for target in lora.targets)
    conditions = (not on_cpu, dtype is Dtype.bfloat16, lora.rank <= MOST, not in_tower)
    return bool(rollout.vllm.engine_kwargs.get("enable_lora", all(conditions)))


def layer_rank(lora: LoraConfig) -> int | None:
    """Return the rank that vLLM's layers have room for, at least that of the adapters; None
    where it has none.
    """
    return next((rank for rank in _RANKS if rank >= lora.rank), None)
