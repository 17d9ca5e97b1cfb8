"""Settings that let a trained model need less of an accelerator's memory, the mildest first, with what each comes to.

What comes first costs a little time; then come more messages, the host's memory, and another way of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.planner import Footprint, Remedy
from siirl_dask.training.memory import ModelOnWorkers, footprint

_LEAST_TOKENS = 1024  # of a micro-batch: smaller ones save little, and take longer
_RANK = 16  # of adapters that are proposed
Tokens = Callable[[TrainerConfig], int]
"""Function that returns the tokens of the largest micro-batch."""
Adapters = Callable[[TrainerConfig], int]
"""Function that returns the parameters of the adapters."""


def with_remedies(model: ModelOnWorkers, key: str, tokens: Tokens, adapters: Adapters) -> Footprint:
    """Return the model's memory with its remedies; ``key`` is that of its group in the configuration."""
    found = []
    for setting, changed in _changes(model, key, tokens, adapters):
        found.append(Remedy(setting, footprint(changed)))
    return replace(footprint(model), remedies=tuple(found))


def _changes(
    model: ModelOnWorkers, key: str, tokens: Tokens, adapters: Adapters
) -> Iterator[tuple[str, ModelOnWorkers]]:
    def changed(**fields: object) -> ModelOnWorkers:
        trainer = replace(model.trainer, **fields)  # type: ignore[arg-type]  # each is a field's value
        learned = adapters(trainer) if trainer.lora.rank else 0
        return replace(model, trainer=trainer, tokens=tokens(trainer), adapters=learned)

    split = model.trainer.fsdp.tensor_parallel > 1
    if model.learns and not model.trainer.gradient_checkpointing:
        model = changed(gradient_checkpointing=True)
        yield f"{key}.gradient_checkpointing=true", model
    while (half := model.tokens // 2) >= _LEAST_TOKENS:
        smaller = changed(max_tokens_per_micro_batch=half)
        if smaller.tokens == model.tokens:  # a row's length
            break
        model = smaller
        yield f"{key}.max_tokens_per_micro_batch={half}", model
    if model.trainer.backend is Backend.torch and model.ranks > 1:
        model = changed(backend=Backend.fsdp)
        yield f"{key}.backend=fsdp", model
    if not model.trainer.fsdp.offload and not split:
        alone = model.trainer.backend is Backend.torch
        model = changed(backend=Backend.fsdp, fsdp=replace(model.trainer.fsdp, offload=True))
        yield f"{f'{key}.backend=fsdp ' if alone else ''}{key}.fsdp.offload=true", model
    if model.learns and not model.adapters and not split:
        model = changed(lora=replace(model.trainer.lora, rank=_RANK))
        yield f"{key}.lora.rank={_RANK}", model
