"""vLLM's own adapters (LoRA): its layers compute ``x W^T + scaling * (x A^T) B^T``, so weights stay as they are.

Import ``process`` and prepare it before this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from siirl_dask.config import LoraConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import WEIGHT, A, Adapter, B
from siirl_dask.rollout.adapter_choice import MOST, layer_rank

_NUMBER = 1  # of the only adapter
POLICY = LoRARequest("policy", _NUMBER, "in memory")
"""Names the adapters that the engine has: they are put there, and read from nowhere."""


def layer_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for adapters of this rank."""
    rank = layer_rank(lora)
    if rank is None:
        raise ConfigError(
            f"trainer.lora.rank={lora.rank}: vLLM has layers for adapters of at most {MOST}; leave "
            "rollout.vllm.engine_kwargs.enable_lora out, so that it gets weights with the adapters merged in"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def put_adapters(model: nn.Module, adapters: Mapping[str, Adapter], scaling: float) -> None:
    """Replace the adapters of a model inside vLLM. ConfigError for layers that vLLM has no adapters for."""
    manager: Any = model.lora_manager
    tensors, rank = dict[str, Tensor](), 0
    for name, adapter in adapters.items():
        layer = name.removesuffix(WEIGHT)
        tensors |= {layer + A: adapter.a, layer + B: adapter.b}
        rank = adapter.a.shape[0]
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    made = LoRAModel.from_lora_tensors(
        _NUMBER,
        tensors,
        PEFTHelper(r=rank, lora_alpha=scaling * rank, target_modules=[]),  # alpha may be a fraction
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    if unknown := sorted(made.loras.keys() - known):
        raise ConfigError(
            f"vLLM has no adapters for {unknown[:3]}: give trainer.lora.targets without them, or let vLLM have the "
            "merged weights (rollout.vllm.engine_kwargs.enable_lora=false)"
        )
    manager.remove_adapter(_NUMBER)
    manager.add_adapter(made)
    manager.activate_adapter(_NUMBER)
