"""How a model lies on the ranks of its role, as far as trainers and critics need to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from siirl_dask.config import Dtype, ModelConfig, TrainerConfig
from siirl_dask.models.loading import load_pretrained
from siirl_dask.training.model.network import Network, compile_layers, recompute, use_packed_attention
from siirl_dask.training.packing import MicroBatch, micro_batches
from siirl_dask.training.parallel.dtensor import full_tensors, like_dtensor, local
from siirl_dask.training.trainer import PackedRows

N = TypeVar("N", bound=Network)
Make = Callable[..., N]
"""Called with a causal model, ``device`` and ``autocast``."""


class ModelBackend(Protocol):
    """A backend: everything in which trainers differ."""

    device: torch.device
    """Where it computes."""
    shard_group: Any
    """The process group that a parameter is sharded over, None where every rank holds the whole model."""

    def network(self, make: Make[N]) -> N:
        """The network with the weights of the model's folder. ConfigError when they cannot be loaded."""
        ...

    def micro_batches(self, rows: PackedRows) -> list[MicroBatch]:
        """Every row in one of them, and as many as all ranks must go through alike."""
        ...


class ReplicatedBackend:
    """Plain torch: the whole model on every rank.

    Parameters are float32 whatever ``model.dtype`` is: with bfloat16 only the arithmetic is (autocast), because an
    update of 1e-6 is lost on a bfloat16 number.
    """

    shard_group = None

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, *, device: str) -> None:
        self.device = torch.device(device)
        self._model, self._trainer = model, trainer

    def network(self, make: Make[N]) -> N:
        what = f"model.path={self._model.path!r}"
        model = load_pretrained(AutoModelForCausalLM, self._model.path, torch.float32, what)
        model.to(self.device)  # type: ignore[arg-type]  # a decorator hides its type
        network = make(model, device=self.device, autocast=self._model.dtype is Dtype.bfloat16)
        use_packed_attention(network, self._model.path)
        if self._trainer.compile:
            compile_layers(network.layers())
        if self._trainer.gradient_checkpointing:
            recompute(network.layers())
        return network

    def micro_batches(self, rows: PackedRows) -> list[MicroBatch]:
        return micro_batches(rows, self._trainer.max_tokens_per_micro_batch)


def full_weights(
    named: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """One parameter after the other: of those in shards no more are whole at a time than one message brings, if the
    caller keeps none. Every rank must go through all of them.
    """

    def moved(parameter: Tensor) -> Tensor:
        held = local(parameter)
        there = held.to(device, dtype)
        return parameter if there is held else like_dtensor(parameter, there)

    return full_tensors((name, moved(parameter)) for name, parameter in named)
