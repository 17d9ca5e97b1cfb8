"""vLLM's own adapters (LoRA): its layers compute ``x W^T + scaling * (x A^T) B^T``, so weights stay
as they are.

Import ``process`` and prepare it before this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm import LLM
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from siirl_dask.config import LoraConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import WEIGHT, A, Adapter, B
from siirl_dask.rollout.base_weights import Adapters
from siirl_dask.rollout.vllm_engine.adapter_choice import MOST, layer_rank
from siirl_dask.rollout.vllm_engine.releases import renames_of


class Slots:
    """The adapters that an engine has in its layers, one set for each agent: put there, and read
    from nowhere.
    """

    def __init__(self, agents: Sequence[str]) -> None:
        """``agents`` are those that have the engine in common; none: it has one policy's
        adapters.
        """
        names = list(agents) if agents else [""]
        self._requests: dict[str, LoRARequest] = {}
        for number, name in enumerate(names, 1):
            self._requests[name] = LoRARequest(name or "policy", number, "in memory")
        self._there: dict[str, Adapters] = {}
        self.chosen: LoRARequest | None = None
        """Names the adapters with which requests are computed; None: with the weights alone."""

    def has(self, agent: str, given: Adapters) -> bool:
        """Return whether ``given`` are in the layers; where there are none, nothing is to be put
        there.
        """
        if not given.by_weight:
            return True
        return self._there.get(agent) is given

    def put(self, llm: LLM, agent: str, given: Adapters) -> None:
        """Put adapters into the layers of ``llm``. ConfigError for layers that vLLM has none
        for.
        """
        number = self._requests[agent].lora_int_id
        put = partial(put_adapters, adapters=given.by_weight, scaling=given.scaling, number=number)
        llm.apply_model(put)
        self._there[agent] = given

    def choose(self, agent: str, given: Adapters) -> None:
        """Compute with these adapters from now on; they are in the layers."""
        self.chosen = self._requests[agent] if given.by_weight else None


def layer_arguments(lora: LoraConfig, agents: int = 1) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for adapters of this rank. Those of one agent compute at
    a time, and the host keeps the others'.
    """
    rank = layer_rank(lora)
    if rank is None:
        raise ConfigError(
            f"trainer.lora.rank={lora.rank}: vLLM has layers for adapters of at most {MOST}; leave "
            "rollout.vllm.engine_kwargs.enable_lora out, so that it gets weights with the adapters "
            "merged in"
        )
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": agents, "max_lora_rank": rank}


def put_adapters(
    model: nn.Module,
    adapters: Mapping[str, Adapter],
    scaling: float,
    number: int = 1,
) -> None:
    """Replace set ``number`` of the adapters of a model inside vLLM. ConfigError for layers that
    vLLM has none for.
    """
    manager: Any = model.lora_manager
    tensors: dict[str, Tensor] = {}
    rank = 0
    for name, adapter in adapters.items():
        layer = name.removesuffix(WEIGHT)
        tensors |= {layer + A: adapter.a, layer + B: adapter.b}
        rank = adapter.a.shape[0]
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    made = LoRAModel.from_lora_tensors(
        number,
        tensors,
        PEFTHelper(r=rank, lora_alpha=scaling * rank, target_modules=[]),  # alpha may be a fraction
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else renames_of(mapper),
    )
    known = {
        *manager.modules,
        *(part for parts in manager.packed_modules.values() for part in parts),
    }
    if unknown := sorted(made.loras.keys() - known):
        raise ConfigError(
            f"vLLM has no adapters for {unknown[:3]}: give trainer.lora.targets without them, or "
            "let vLLM have the merged weights (rollout.vllm.engine_kwargs.enable_lora=false)"
        )
    manager.remove_adapter(number)
    manager.add_adapter(made)
    manager.activate_adapter(number)
