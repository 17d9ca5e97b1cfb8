"""Layout of a model over the ranks of its role: the protocol, and the backend with a full
replica on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from siirl_dask.config import ImagesConfig, ModelConfig, TrainerConfig
from siirl_dask.models.loading import load_pretrained, model_class
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.files.safetensors import load_adapters
from siirl_dask.training.layouts import operators_of
from siirl_dask.training.model.layers import compile_layers, recompute
from siirl_dask.training.model.network import Network
from siirl_dask.training.model.trial import use_row_layout
from siirl_dask.training.packing import MicroBatch, micro_batches
from siirl_dask.training.parallel.dtensor import full_tensors, like_dtensor, local
from siirl_dask.training.trainer import PackedRows

N = TypeVar("N", bound=Network)
Make = Callable[..., N]
"""Makes a network from a causal model, ``device``, ``autocast``, and ``inputs`` that lay out
images."""


class ModelBackend(Protocol):
    """Everything that depends on how a model lies on its ranks. Policies, references and critics
    take any backend.
    """

    device: torch.device
    """Device that computes."""
    shard_ranks: Sequence[int] | None
    """Ranks of the role that each parameter is sharded over; None where every rank holds the
    full model."""
    holds_groups: bool
    """Whether networks keep process groups, and so must be built anew for others."""

    def network(self, make: Make[N]) -> N:
        """Build the network with the weights of the model's folder. ConfigError when they cannot
        be loaded.
        """
        ...

    def micro_batches(self, rows: PackedRows, inputs: ImageInputs | None) -> list[MicroBatch]:
        """Cut rows into micro-batches, the same number on every rank if passes need all ranks.
        ``inputs`` are those of the network.
        """
        ...


class ReplicatedBackend:
    """Plain torch with the full model on every rank; the ranks stay equal bit for bit.

    Parameters are float32 for any ``model.dtype``: bfloat16 is used for arithmetic only (autocast),
    because an update of 1e-6 is lost on a bfloat16 number.
    """

    shard_ranks: Sequence[int] | None = None
    holds_groups = False

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        *,
        device: str,
        images: ImagesConfig | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``progress`` is called for each micro-batch."""
        self.device = torch.device(device)
        self._progress = progress
        self._model = model
        self._trainer = trainer
        self._images = images

    def network(self, make: Make[N]) -> N:
        path = self._model.path
        subject = f"model.path={self._model.path!r}"
        kind = model_class(path, subject)
        longest = self._model.longest_row
        model = load_pretrained(kind, path, torch.float32, subject, longest_row=longest)
        model.to(self.device)  # type: ignore[arg-type]  # a decorator hides its type
        inputs = ImageInputs.load(path, self._images, model)
        autocast = torch_dtype(self._model.dtype, self.device) is torch.bfloat16
        network = make(model, device=self.device, autocast=autocast, inputs=inputs)
        load_adapters(network, self._trainer.lora)
        use_row_layout(network, path, operators_of(self._trainer, self.device.type), longest)
        if self._trainer.compile:
            compile_layers(network.layers())
        if self._trainer.gradient_checkpointing:
            recompute([*network.layers(), *network.tower_layers()])
        network.register_forward_hook(lambda *_: self._progress())
        return network

    def micro_batches(self, rows: PackedRows, inputs: ImageInputs | None) -> list[MicroBatch]:
        return micro_batches(rows, self._trainer.max_tokens_per_micro_batch, inputs=inputs)


def full_weights(
    named: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield each full parameter on ``device`` in ``dtype``. Every rank must iterate to the end.

    Sharded parameters are gathered one message at a time, so no more are in memory at once if the
    caller keeps none.
    """

    def converted(parameter: Tensor) -> Tensor:
        shard = local(parameter)
        moved = shard.to(device, dtype)
        if moved is shard:
            return parameter
        return like_dtensor(parameter, moved)

    return full_tensors((name, converted(parameter)) for name, parameter in named)
