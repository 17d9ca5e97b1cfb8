"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): t ranks that go through the same micro-batches with 1 / t of the
heads and of the feed-forward width each, by the plan that transformers has for the model.

What is beside the layers, embeddings, norms and head, is whole on each of them, and computed by each. Every rank keeps
the scores of its own rows; on the way back the ranks' gradients of them are put together, so all go back alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from siirl_dask.context import Rank
from siirl_dask.errors import ConfigError
from siirl_dask.training.packing import MicroBatch, micro_batches
from siirl_dask.training.parallel.own_rows import TensorParallelRows
from siirl_dask.training.parallel.sequence_parallel import gather_rows, own_rows
from siirl_dask.training.trainer import PackedRows


def split_layers(model: PreTrainedModel, mesh: DeviceMesh, path: str) -> None:
    """The decoder's layers over ``mesh``, of one dimension. ConfigError when transformers has no plan for them."""
    decoder = model.get_decoder()
    plan = getattr(decoder.config, "base_model_tp_plan", None) or {}
    layers = {name: style for name, style in plan.items() if name.startswith("layers.")}
    if not layers:
        raise ConfigError(
            f"trainer.fsdp.tensor_parallel={mesh.size()}: transformers has no plan for "
            f"{type(model).__name__} of {path!r}"
        )
    apply_tensor_parallelism(decoder, mesh, layers)


def common_batches(rows: PackedRows, ranks: Rank, budget: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of the rows of all ``ranks``, the same on each of them, all of which must call. ``offsets`` and
    ``tokens`` are of those of its rows that are this rank's own.
    """
    union, owners = gather_rows(rows, ranks, device)
    batches, first, done = [], 0, 0
    for whole in micro_batches(union, budget):
        part, owner = own_rows(whole, owners[first:], ranks, done)
        batches.append(replace(part, own_rows=TensorParallelRows(owner == ranks.rank, ranks.group)))
        first, done = first + len(whole.offsets) - 1, part.tokens.stop
    return batches
