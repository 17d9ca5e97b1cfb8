"""The policy's new weights, as rows: one a parameter. They travel as any rows do, worker to worker.

Of a policy with adapters (``trainer.lora_rank``) either all of its parameters, with what the adapters add, or the
adapters alone, to workers that can read ``model.path`` and merge them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Context
from siirl_dask.errors import PeerError
from siirl_dask.planner import columns
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import (
    GROUP_ID,
    PARAMETER,
    PARAMETER_DATA,
    PARAMETER_DTYPE,
    PARAMETER_SHAPE,
    ROW_ID,
    TOKENS,
    TYPES,
    fields,
)
from siirl_dask.training import Trainer

_WEIGHTS = fields(PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE, PARAMETER_DATA)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@columns(writes=_WEIGHTS, new_rows=True, passes=False)
def publish_weights(ctx: Context, table: pa.Table) -> pa.Table:
    """This worker's share of the parameters: each is published by one worker of the role, and all share the load.

    A copy: the rows stay as they are while the next update goes on.
    """
    trainer: Trainer = ctx.resource
    return _published(ctx, trainer.weights())


@columns(writes=_WEIGHTS, new_rows=True, passes=False)
def publish_adapters(ctx: Context, table: pa.Table) -> pa.Table:
    """The same of the adapters alone, in float32, for ``load_adapters``."""
    from siirl_dask.training.lora import is_adapter
    from siirl_dask.training.placement import whole_weights  # imports transformers

    trainer: Trainer = ctx.resource
    adapters = trainer.state()["model"]
    if not all(map(is_adapter, adapters)):
        raise TypeError("this policy has no adapters: give its trainer a lora_rank, or run publish_weights")
    return _published(ctx, whole_weights(adapters.items(), torch.device(ctx.device.torch_name), torch.float32))


def _published(ctx: Context, weights: Iterable[tuple[str, Tensor]]) -> pa.Table:
    named = [item for item in enumerate(weights) if item[0] % ctx.rank.size == ctx.rank.rank]
    tensors = [tensor.detach().contiguous() for _, (_, tensor) in named]
    index = pa.array([number for number, _ in named], pa.int64())
    arrays = {
        ROW_ID: index,
        GROUP_ID: index,
        TOKENS: pa.array([tensor.numel() for tensor in tensors], pa.int64()),
        PARAMETER: pa.array([name for _, (name, _) in named], TYPES[PARAMETER]),
        PARAMETER_DTYPE: pa.array([str(tensor.dtype).removeprefix("torch.") for tensor in tensors], pa.string()),
        PARAMETER_SHAPE: pa.array([list(tensor.shape) for tensor in tensors], TYPES[PARAMETER_SHAPE]),
        PARAMETER_DATA: _as_binary(tensors),
    }
    return pa.table(arrays)


@columns(reads=[PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE, PARAMETER_DATA])
def load_weights(ctx: Context, table: pa.Table) -> pa.Table:
    """Put the weights into the engine; the node asks for rows=REPLICATED. Their version is the number of steps
    trained.
    """
    engine: RolloutEngine = ctx.resource
    engine.load_weights(_tensors(table), ctx.step)
    return table


@columns(reads=[PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE, PARAMETER_DATA])
def load_adapters(ctx: Context, table: pa.Table, *, model: ModelConfig, trainer: TrainerConfig) -> pa.Table:
    """As ``load_weights``, of the weights in ``model.path`` with what the adapters add, which is merged here."""
    from siirl_dask.training.lora import merged
    from siirl_dask.training.weight_files import read_weights

    engine: RolloutEngine = ctx.resource
    dtype, scaling = _DTYPES[model.dtype], trainer.lora_alpha / trainer.lora_rank
    named = {**read_weights(model.path), **dict(_tensors(table))}
    weights = ((name, tensor.to(dtype)) for name, tensor in merged(named, scaling, torch.device("cpu")))
    engine.load_weights(weights, ctx.step)
    return table


def _as_binary(tensors: list[Tensor]) -> pa.Array:
    """One large_binary array of all tensors' bytes, copied once."""
    ends = np.cumsum([0, *(tensor.nbytes for tensor in tensors)], dtype=np.int64)
    data = np.empty(int(ends[-1]), dtype=np.uint8)
    for tensor, start, stop in zip(tensors, ends[:-1], ends[1:], strict=True):
        data[start:stop] = tensor.reshape(-1).view(torch.uint8).cpu().numpy()
    return pa.Array.from_buffers(pa.large_binary(), len(tensors), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _tensors(table: pa.Table) -> Iterator[tuple[str, Tensor]]:
    data = table[PARAMETER_DATA].combine_chunks()
    described = table.select([PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE]).to_pylist()
    for row, description in enumerate(described):
        name, dtype, shape = description[PARAMETER], description[PARAMETER_DTYPE], description[PARAMETER_SHAPE]
        raw = data[row].as_buffer()
        if dtype not in _DTYPES or raw.size != _DTYPES[dtype].itemsize * int(np.prod(shape)):
            raise PeerError(f"parameter {name!r}: {raw.size} bytes are no {dtype} tensor of shape {shape}")
        flat = torch.frombuffer(raw, dtype=_DTYPES[dtype]) if raw.size else torch.empty(0, dtype=_DTYPES[dtype])
        yield name, flat.reshape(shape)
