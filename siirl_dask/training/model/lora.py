"""LoRA (arXiv:2106.09685): a linear layer computes ``x (W + alpha / rank * B A)^T``. A [rank, in]
and B [out, rank] learn; W [out, in] stays as the folder has it. The layers are peft's.

An adapter's parameters are named beside the weight that they change: ``q_proj.weight``,
``q_proj.lora_A.weight``, ``q_proj.lora_B.weight``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import sqrt
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from siirl_dask.config import TrainerConfig, VisionPart
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.models.adapters import WEIGHT, A, B, is_adapter
from siirl_dask.training.parallel.dtensor import full_tensor, like_dtensor, local

_PEFT_NAME = "default"  # peft's name for an unnamed adapter; files leave it out
P = TypeVar("P")
_OF_ADAPTER = re.compile(r"\.lora_[AB]\.(\w+)\.weight$")


def add_adapters(
    model: nn.Module,
    layers: Iterable[nn.Module],
    tower: Iterable[nn.Module],
    trainer: TrainerConfig,
    agents: Sequence[str] = ("",),
) -> None:
    """Add adapters to the linear layers that ``trainer.lora.targets`` names, in ``layers`` of the
    decoder and of the ``tower`` that sees images, a set for each of ``agents``, and freeze the
    rest.

    ``first_values`` gives their values. ConfigError for a name that no linear layer has, and
    without peft.
    """
    try:
        from peft import inject_adapter_in_model  # an extra, and a second to import
    except ImportError as error:
        raise ConfigError(
            f"trainer.lora.rank={trainer.lora.rank} needs peft: pip install 'siirl_dask[lora]'"
        ) from error
    decoder = _linear(layers)
    seeing = _linear(tower)
    if not decoder:
        raise ConfigError(
            f"trainer.lora.rank={trainer.lora.rank}: {type(model).__name__} has no layers of "
            "torch.nn.Linear, which get adapters; leave it out"
        )
    of_decoder, of_tower = chosen_targets(trainer, set(decoder.values()), set(seeing.values()))
    chosen = {module for module, name in decoder.items() if name in of_decoder}
    chosen |= {module for module, name in seeing.items() if name in of_tower}
    # For a model that it knows peft adds the experts of a mixture where a layer without experts is
    # a target
    whole = nn.ModuleList([model])
    targets = [name for name, module in whole.named_modules() if module in chosen]
    config = peft_config(trainer.lora.rank, trainer.lora.alpha, targets)
    # peft draws what first_values replaces
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # of the agent before
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        for agent in agents:
            inject_adapter_in_model(config, whole, _peft_name(agent))


def _linear(layers: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the linear layers within ``layers``, each with the last part of its name. A router,
    say, that is one by its class and computes something else is none.
    """
    return {
        module: name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }


def chosen_targets(
    trainer: TrainerConfig, decoder: set[str], tower: set[str]
) -> tuple[set[str], set[str]]:
    """Return the linear layers, by the names of those in the decoder and in the tower that sees
    images, that get adapters. ConfigError for a target that is none of them.
    """
    known: dict[str, tuple[set[str], set[str]]] = {name: ({name}, set()) for name in decoder}
    if tower:
        known |= {
            str(VisionPart.visual): (set(), tower),
            str(VisionPart.language_model): (decoder, set()),
        }
        known |= {f"{VisionPart.visual}.{name}": (set(), {name}) for name in tower}
    of_decoder: set[str] = set()
    of_tower: set[str] = set()
    for target in trainer.lora.targets:
        if target not in known:
            where = "the model's decoder"
            if tower:
                where = "the model"
            raise ConfigError(
                f"trainer.lora.targets={trainer.lora.targets}: {where} has no linear layer "
                f"{target!r} (there are: {sorted(known)}){did_you_mean(target, known)}"
            )
        of_decoder |= known[target][0]
        of_tower |= known[target][1]
    if trainer.lora.targets:
        return (of_decoder, of_tower)
    return (decoder, set())


def peft_config(rank: int, alpha: float, targets: Sequence[str], base: str | None = None) -> Any:
    """Return peft's LoraConfig; ``base`` is the folder of the model that the adapters were
    trained on.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # it takes fractions as well
        target_modules=list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def by_file_name(named: Iterable[tuple[str, P]], agent: str = "") -> dict[str, P]:
    """Return the parameters of a model with peft's layers by their names in files, without
    adapters of other agents.
    """
    own = _peft_name(agent)
    found: dict[str, P] = {}
    for name, parameter in named:
        adapter = _OF_ADAPTER.search(name)
        if adapter is None:
            found[name.replace(".base_layer.", ".")] = parameter
        elif adapter[1] == own:
            found[name.replace(f".{own}.", ".")] = parameter
    return found


def choose_adapters(model: nn.Module, agent: str) -> None:
    """Let the model compute with the adapters of ``agent``, and let these learn: no others do
    then.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(_peft_name(agent))


def _peft_name(agent: str) -> str:
    if agent:
        return f"agent_{agent}"
    return _PEFT_NAME


def rank_of(name: str, tensor: Tensor) -> int:
    """Return the rank of the adapter with this parameter."""
    return tensor.shape[0 if name.endswith(A) else 1]


def first_values(name: str, shape: Sequence[int]) -> Tensor:
    """Return the initial value of an adapter's parameter: B is 0, so that nothing changes, and A is
    Kaiming-uniform as in peft. The seed depends on the name alone, so every rank, backend and start
    draws the same.
    """
    values = torch.zeros(tuple(shape))
    if name.endswith(A):
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        nn.init.kaiming_uniform_(values, a=sqrt(5), generator=torch.Generator().manual_seed(seed))
    return values


def merged(
    named: Mapping[str, Tensor], scaling: float, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with their adapters merged: ``W + scaling * B A``, or the parameter
    itself without adapter.

    A merged parameter is a new float32 tensor on ``device``, laid out like W. For a sharded model
    every rank must iterate to the end, since A is gathered. ValueError for adapters of weights that
    ``named`` lacks.
    """
    orphans = [
        name for name in named if name.endswith(A) and name.removesuffix(A) + WEIGHT not in named
    ]
    if orphans:
        raise ValueError(f"there are adapters of weights that are not there: {orphans[:5]}")
    for name, weight in named.items():
        layer = name.removesuffix(WEIGHT)
        if layer + A in named:
            a = named[layer + A]
            b = named[layer + B]
            full_a = full_tensor(like_dtensor(a, local(a).to(device)))
            shard = local(weight).to(device, torch.float32)  # B is sharded along its rows like W
            yield (
                name,
                like_dtensor(
                    weight, torch.addmm(shard, local(b).to(device), full_a, alpha=scaling)
                ),
            )
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
