"""Tensor parallelism (Megatron-LM, arXiv:1909.08053) of the decoder's layers, by transformers' plan
for the model.

t ranks run the same micro-batches, each with 1/t of the heads and of the feed-forward width.
Embeddings, norms and head are replicated, and every rank computes them. A rank keeps the scores of
its own rows; the backward pass puts the gradients of all ranks' scores together first, so all ranks
run the same backward pass.
"""

from __future__ import annotations

import inspect
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
    """Split the decoder's layers over ``mesh`` [t]. ConfigError when transformers has no plan
    for them.
    """
    decoder = model.get_decoder()
    plan = getattr(decoder.config, "base_model_tp_plan", None)
    if plan is None:
        plan = {}
    layers = {name: style for name, style in plan.items() if name.startswith("layers.")}
    if not layers:
        raise ConfigError(
            f"trainer.fsdp.tensor_parallel={mesh.size()}: transformers has no plan for "
            f"{type(model).__name__} of {path!r}"
        )
    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:
        apply_tensor_parallelism(decoder, mesh, layers)
        return
    decoder.tp_plan = layers  # transformers 5.17 goes by the model's own plan
    apply_tensor_parallelism(decoder, mesh)


def common_batches(
    rows: PackedRows,
    ranks: Rank,
    budget: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Cut the rows of all ``ranks`` into micro-batches, the same on each rank. All of them must
    call.

    For the fields of a tensor-parallel MicroBatch see there.
    """
    union, owners = gather_rows(rows, ranks, device)
    batches = []
    first = 0
    done = 0
    for whole in micro_batches(union, budget):
        part, owner = own_rows(whole, owners[first:], ranks, done)
        batches.append(replace(part, own_rows=TensorParallelRows(owner == ranks.rank, ranks.group)))
        first = first + len(whole.offsets) - 1
        done = part.tokens.stop
    return batches
