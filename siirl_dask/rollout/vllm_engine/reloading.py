"""New weights for vLLM's model in the form in which vLLM takes all of them, and what it leaves as
it was.

vLLM 0.32 loads into tensors without memory and fills them layer by layer, through the loaders of
parameters. Models that copy a tensor into a parameter themselves copy into nothing: vLLM warns, and
goes on with the weights that it had.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank

from siirl_dask.errors import RunError

_OF_ALL_EXPERTS = re.compile(
    r"(?P<experts>.+\.mlp\.experts)\.(?P<part>(?:gate_up|down)_proj(?:_bias)?)$"
)
_SINKS = ("sinks", "attention_sink_bias")  # of GPT-OSS, and of MiMo-V2
_ENDS_OF_SINKS = tuple(f".{name}" for name in _SINKS)
# of latent attention, which vLLM makes anew of its projection (kv_b_proj) after each loading
_MADE_OF_OTHERS = (".W_UK_T", ".W_UV")
_RELOAD = "vllm.model_executor.model_loader.reload"
_LEFT_OUT = re.compile(
    r"(?P<layer>\w+): Failed to load weights|Following weights were not loaded from checkpoint: "
    r"(?P<names>.+)",
    re.DOTALL,
)


class NewWeights:
    """Weights on their way to vLLM, by the names of files.

    GPT-OSS's experts and the sinks of all are what vLLM would copy into nothing: experts go one by
    one, through the loader, and sinks afterwards.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self._sinks: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, those of all experts together [E, ...] an expert at a time."""
        for name, tensor in self._weights:
            if name.endswith(_ENDS_OF_SINKS):
                self._sinks[name] = tensor.clone()
                continue
            matched = _OF_ALL_EXPERTS.match(name)
            if matched is None:
                yield name, tensor
                continue
            for expert, own in enumerate(tensor):
                yield f"{matched['experts']}.{expert}.{matched['part']}", own

    def copy_sinks(self, model: nn.Module) -> None:
        """Copy the sinks of this rank's heads into vLLM's model."""
        there = dict(model.named_parameters())
        for name, tensor in self._sinks.items():
            # GPT-OSS's attention has a name of its own there
            own = name if name in there else name.replace(".self_attn.", ".attn.")
            parameter = there[own]
            heads = len(parameter)
            parameter.data.copy_(tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads))


@contextmanager
def nothing_left_out(with_weights: Callable[[], set[str]]) -> Iterator[None]:
    """Raise RuntimeError, by name, where vLLM leaves weights of the model as they were: it only
    warns.

    ``with_weights`` returns ``layers_with_weights`` of the model.
    """
    layers: set[str] = set()
    weights: set[str] = set()

    def note(record: logging.LogRecord) -> bool:
        matched = _LEFT_OUT.search(record.getMessage())
        if matched is None:
            return True
        if matched["layer"] is not None:
            layers.add(matched["layer"])
        weights.update(re.findall(r"'([^']+)'", matched["names"] or ""))
        return False

    loggers = [logging.getLogger(f"{_RELOAD}.{name}") for name in ("layerwise", "inplace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addFilter(note)
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeFilter(note)
            logger.setLevel(level)
    left_out = (layers & with_weights()) | {
        name for name in weights if not name.endswith((*_ENDS_OF_SINKS, *_MADE_OF_OTHERS))
    }
    if left_out:
        raise RuntimeError(
            f"it left out {', '.join(sorted(left_out))}, and would go on with their old weights"
        )


def layers_with_weights(model: nn.Module) -> set[str]:
    """Return the classes of layers with parameters of their own, other than sinks. A tied head has
    the embedding's, and buffers follow from the config.
    """
    owners = Counter(
        id(parameter) for layer in model.modules() for parameter in layer.parameters(recurse=False)
    )
    found = set()
    for layer in model.modules():
        own = [
            name
            for name, one in layer.named_parameters(recurse=False)
            if owners[id(one)] == 1 and name not in _SINKS
        ]
        if own:
            found.add(type(layer).__name__)
    return found


def forget_prefixes(llm: Any) -> None:
    """Forget keys and values of prompts, which other weights have made. RunError where vLLM keeps
    some: it only warns, and would go on with them.
    """
    if llm.reset_prefix_cache() is False:
        raise RunError(
            "vLLM keeps keys and values of the weights before, since it has not let go of all "
            "requests: give rollout.vllm.enable_prefix_caching=false, and leave kv_transfer_config "
            "out of rollout.vllm.engine_kwargs"
        )


def preempt_all(engine: Any) -> None:
    """Preempt all requests under way, and forget all keys and values: one of the old weights under
    the new ones would be a third model's.

    On accelerators vLLM has begun another token of each (asynchronous scheduling), of the weights
    of now. It drops those of the requests that it preempts here, and of those that it has preempted
    before, for want of memory, it would take them as the first ones of the next weights.
    """
    for request in engine.engine_core.engine_core.scheduler.waiting:
        if getattr(request, "num_stale_output_tokens", 0):  # earlier releases have none
            request.drop_stale_output = True
    engine.reset_prefix_cache(reset_running_requests=True)


def pack_for_cpu(model: nn.Module) -> None:
    """Pack what vLLM packs for a CPU at the start, and not when it reloads: a tied head, which is a
    packed copy of the embedding, and the experts of a mixture.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
