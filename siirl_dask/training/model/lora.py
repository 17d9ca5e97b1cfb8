"""LoRA (arXiv:2106.09685): a linear layer computes ``x (W + alpha / rank * B A)^T``, and of it only A [rank, in] and
B [out, rank] learn; W [out, in] stays as the folder has it. The layers are peft's.

By name, an adapter's parameters lie beside the weight that they change: ``q_proj.weight``, ``q_proj.lora_A.weight`` and
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
from siirl_dask.training.parallel.dtensor import full_tensor, like_dtensor, local

_WEIGHT, _A, _B = ".weight", ".lora_A.weight", ".lora_B.weight"
_PEFT_NAME = "default"  # of an adapter that nobody named; its file has none


def add_adapters(model: nn.Module, layers: Iterable[nn.Module], trainer: TrainerConfig) -> None:
    """Put adapters beside the linear layers in ``layers`` that ``trainer.lora.targets`` names: from here on nothing of
    ``model`` has a gradient but them. ConfigError for a name that no linear layer has, and without peft.

    They hold nothing yet: see ``first_values``.
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
    """Which of the layers named ``linear`` get adapters. ConfigError for a target that is none of them."""
    for target in trainer.lora.targets:
        if target not in linear:
            raise ConfigError(
                f"trainer.lora.targets={trainer.lora.targets}: the model's decoder has no linear layer {target!r} "
                f"(there are: {sorted(linear)}){did_you_mean(target, linear)}"
            )
    return sorted(set(trainer.lora.targets) or linear)


def peft_config(rank: int, alpha: float, targets: Sequence[str], base: str | None = None) -> Any:
    """peft's LoraConfig of such adapters; ``base`` is the folder of the model that they are for."""
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
    """A parameter's name in a file, of its name in a model with peft's layers."""
    return name.replace(".base_layer.", ".").replace(f".{_PEFT_NAME}.", ".")


def is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def rank_of(name: str, tensor: Tensor) -> int:
    """Of the adapter that has this parameter."""
    return tensor.shape[0 if name.endswith(_A) else 1]


def first_values(name: str, shape: Sequence[int]) -> Tensor:
    """What an adapter's parameter begins as: B is 0, so that it changes nothing, and A is drawn (Kaiming-uniform, as
    peft does), from a seed that follows from its name alone: the same on every rank, backend and start.
    """
    values = torch.zeros(*shape)
    if name.endswith(_A):
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        nn.init.kaiming_uniform_(values, a=sqrt(5), generator=torch.Generator().manual_seed(seed))
    return values


def merged(named: Mapping[str, Tensor], scaling: float, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every parameter but those of adapters, one after the other, whatever has an adapter as ``W + scaling * B A`` on
    ``device``: a new tensor in float32, laid out as W. The others are as given. ValueError for adapters of what is not
    there.

    Of a model in shards every rank must go through all of them: A is gathered.
    """
    lost = [name for name in named if name.endswith(_A) and name.removesuffix(_A) + _WEIGHT not in named]
    if lost:
        raise ValueError(f"there are adapters of weights that are not there: {lost[:5]}")
    for name, weight in named.items():
        before = name.removesuffix(_WEIGHT)
        if before + _A in named:
            a, b = named[before + _A], named[before + _B]
            gathered = full_tensor(like_dtensor(a, local(a).to(device)))
            held = local(weight).to(device, torch.float32)  # B is cut along its rows as W is
            yield name, like_dtensor(weight, torch.addmm(held, local(b).to(device), gathered, alpha=scaling))
        elif not is_adapter(name):
            yield name, weight


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, layers compute as they did before there were adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)
