"""Settings that let a trained model need less of an accelerator's memory, the mildest first, with
what each comes to.

Fewer tokens at once come before layers that are computed again, which costs a third of the update's
time, down to where a pass keeps a device busy; then come more messages, the host's memory between
two roles and within a pass, and another way of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from siirl_dask.config import Backend, OptimizerName, TrainerConfig
from siirl_dask.planner import Footprint, Remedy
from siirl_dask.training.memory import ModelOnWorkers, footprint
from siirl_dask.training.specs import TRAINERS, trainer_spec

_BUSY_TOKENS = 4096  # of a micro-batch that keeps a device busy
_PARTS = 8  # of the tokens of a micro-batch; the largest number of them that fits is proposed
_LEAST_TOKENS = 1024  # of a micro-batch: smaller ones save little, and take longer
_RANK = 16  # of adapters that are proposed
# keys that are turned first
_TURNED = frozenset({"gradient_checkpointing", "max_tokens_per_micro_batch"})
Tokens = Callable[[TrainerConfig], int]
"""Function that returns the tokens of the largest micro-batch."""
Adapters = Callable[[TrainerConfig], int]
"""Function that returns the parameters of the adapters."""


def with_remedies(model: ModelOnWorkers, key: str, tokens: Tokens, adapters: Adapters) -> Footprint:
    """Return the model's memory with its remedies; ``key`` is that of its group in the
    configuration.
    """
    one = footprint(model)
    park = Remedy(f"{key}.park=true", one.parked(), parks=True)
    parks = []
    if one.parks and not model.trainer.park:
        parks = [park]
    before: list[Remedy] = []
    after: list[Remedy] = []
    for setting, changed in _changes(model, key, tokens, adapters):
        if changed.trainer.fsdp.offload:
            after.append(Remedy(setting, footprint(changed), park.setting))
        else:
            before.append(Remedy(setting, footprint(changed)))
    # once more in the end: what comes between may leave another role at the peak, to which this one
    # leaves its memory
    return replace(one, remedies=(*parks, *before, *parks, *after))


def _changes(
    model: ModelOnWorkers,
    key: str,
    tokens: Tokens,
    adapters: Adapters,
) -> Iterator[tuple[str, ModelOnWorkers]]:
    def changed(**fields: object) -> ModelOnWorkers:
        trainer = replace(model.trainer, **fields)  # type: ignore[arg-type]  # each is a field's value
        learned = 0
        if trainer.lora.rank:
            learned = adapters(trainer)
        frozen = 0
        matrices = 0
        if not learned:
            frozen = model.frozen
            matrices = model.matrices
        return replace(
            model,
            trainer=trainer,
            tokens=tokens(trainer),
            adapters=learned,
            frozen=frozen,
            matrices=matrices,
        )

    reads = trainer_spec(model.trainer.backend).reads
    if not reads >= _TURNED:
        return
    shards_with = model.memory.shards_with
    if model.trainer.backend not in TRAINERS:  # its own options mean nothing to another backend
        shards_with = None
    has_offload = Backend.fsdp in (model.trainer.backend, shards_with)
    split = model.trainer.fsdp.tensor_parallel > 1
    if model.learns and not model.trainer.gradient_checkpointing:
        part = model.tokens // _PARTS
        for parts in range(_PARTS - 1, 0, -1):
            fewer = parts * part
            smaller = changed(max_tokens_per_micro_batch=fewer)
            if fewer < _BUSY_TOKENS or smaller.tokens == model.tokens:  # a row's length
                break
            model = smaller
            yield f"{key}.max_tokens_per_micro_batch={fewer}", model
        model = changed(gradient_checkpointing=True)
        yield f"{key}.gradient_checkpointing=true", model
    while (half := model.tokens // 2) >= _LEAST_TOKENS:
        smaller = changed(max_tokens_per_micro_batch=half)
        if smaller.tokens == model.tokens:  # a row's length
            break
        model = smaller
        yield f"{key}.max_tokens_per_micro_batch={half}", model
    if shards_with is not None and model.ranks > 1:
        model = changed(backend=shards_with)
        yield f"{key}.backend={model.trainer.backend}", model
    given = model.trainer.park
    if has_offload and not model.trainer.fsdp.offload and not split:
        alone = ""
        if model.trainer.backend != Backend.fsdp:
            alone = f"{key}.backend=fsdp "
        model = changed(
            backend=Backend.fsdp,
            park=False,
            fsdp=replace(model.trainer.fsdp, offload=True),
        )
        yield f"{f'{key}.park=false ' if given else ''}{alone}{key}.fsdp.offload=true", model
    if model.learns and not model.adapters and not split and "lora" in reads:
        whole = ""
        if model.trainer.freeze:
            whole = f"{key}.freeze=[] "
        if model.trainer.optimizer != OptimizerName.adamw:
            whole += f"{key}.optimizer={OptimizerName.adamw} "  # Muon steps no adapters
        lora = replace(model.trainer.lora, rank=_RANK)
        model = changed(lora=lora, freeze=[], optimizer=OptimizerName.adamw)
        yield f"{whole}{key}.lora.rank={_RANK}", model
