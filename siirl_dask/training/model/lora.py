"""LoRA (arXiv:2106.09685): a linear layer computes ``x (W + alpha / rank * B A)^T``. A [rank, in] and B [out, rank]
learn; W [out, in] stays as the folder has it. The layers are peft's.

An adapter's parameters are named beside the weight that they change: ``q_proj.weight``, ``q_proj.lora_A.weight``,
``q_proj.lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from siirl_dask.config import TrainerConfig
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.models.adapters import WEIGHT, A, B, is_adapter
from siirl_dask.training.parallel.dtensor import full_tensor, like_dtensor, local

_PEFT_NAME = "default"  # peft's name for an unnamed adapter; files leave it out


def add_adapters(model: nn.Module, layers: Iterable[nn.Module], trainer: TrainerConfig) -> None:
    """Add adapters to the linear layers in ``layers`` that ``trainer.lora.targets`` names, and freeze the rest.

    ``first_values`` gives their values. ConfigError for a name that no linear layer has, and without peft.
    """
    try:
        from peft import inject_adapter_in_model  # an extra, and a second to import
    except ImportError as error:
        raise ConfigError(
            f"trainer.lora.rank={trainer.lora.rank} needs peft: pip install 'siirl_dask[lora]'"
        ) from error
    linear = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    config = peft_config(trainer.lora.rank, trainer.lora.alpha, chosen_targets(trainer, linear))
    with torch.random.fork_rng(devices=[]):  # peft draws numbers, which first_values replaces
        inject_adapter_in_model(config, model, _PEFT_NAME)


def chosen_targets(trainer: TrainerConfig, linear: set[str]) -> list[str]:
    """Return the layers among ``linear`` that get adapters. ConfigError for a target that is none of them."""
    for target in trainer.lora.targets:
        if target not in linear:
            raise ConfigError(
                f"trainer.lora.targets={trainer.lora.targets}: the model's decoder has no linear layer {target!r} "
                f"(there are: {sorted(linear)}){did_you_mean(target, linear)}"
            )
    return sorted(set(trainer.lora.targets) or linear)


def peft_config(rank: int, alpha: float, targets: Sequence[str], base: str | None = None) -> Any:
    """Return peft's LoraConfig; ``base`` is the folder of the model that the adapters were trained on."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # it takes fractions as well
        target_modules=list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def file_name(name: str) -> str:
    """Return the name in files of the parameter called ``name`` in a model with peft's layers."""
    return name.replace(".base_layer.", ".").replace(f".{_PEFT_NAME}.", ".")


def rank_of(name: str, tensor: Tensor) -> int:
    """Return the rank of the adapter with this parameter."""
    return tensor.shape[0 if name.endswith(A) else 1]


def first_values(name: str, shape: Sequence[int]) -> Tensor:
    """Return the initial value of an adapter's parameter: B is 0, so that nothing changes, and A is Kaiming-uniform as
    in peft. The seed depends on the name alone, so every rank, backend and start draws the same.
    """
    values = torch.zeros(*shape)
    if name.endswith(A):
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        nn.init.kaiming_uniform_(values, a=sqrt(5), generator=torch.Generator().manual_seed(seed))
    return values


def merged(named: Mapping[str, Tensor], scaling: float, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with their adapters merged: ``W + scaling * B A``, or the parameter itself without adapter.

    A merged parameter is a new float32 tensor on ``device``, laid out like W. For a sharded model every rank must
    iterate to the end, since A is gathered. ValueError for adapters of weights that ``named`` lacks.
    """
    orphans = [name for name in named if name.endswith(A) and name.removesuffix(A) + WEIGHT not in named]
    if orphans:
        raise ValueError(f"there are adapters of weights that are not there: {orphans[:5]}")
    for name, weight in named.items():
        layer = name.removesuffix(WEIGHT)
        if layer + A in named:
            a, b = named[layer + A], named[layer + B]
            full_a = full_tensor(like_dtensor(a, local(a).to(device)))
            shard = local(weight).to(device, torch.float32)  # B is sharded along its rows like W
            yield name, like_dtensor(weight, torch.addmm(shard, local(b).to(device), full_a, alpha=scaling))
        elif not is_adapter(name):
            yield name, weight


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the ``with`` block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)
