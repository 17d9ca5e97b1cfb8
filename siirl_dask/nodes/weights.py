"""Publishes the policy's new weights as rows, one a parameter, and loads them into engines.

The rows travel from worker to worker as any rows do: in tables of at most ``rollout.weight_bucket``
where only engines read them, in the same step; or as tensors from device to device
(``rollout.weight_sync``). A policy with adapters (``trainer.lora.rank``) publishes either all
parameters with the adapters merged in, or the adapters alone, for engines that have the weights of
``model.path``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.config import LoraConfig
from siirl_dask.context import Context, RowStream, behind
from siirl_dask.errors import PeerError
from siirl_dask.nodes.weight_rows import BinaryBuilder, Parameter, parameter_rows, tensors_of
from siirl_dask.planner import WeightSink, WeightSource, columns
from siirl_dask.rollout import RolloutEngine, TakesAdapters, WeightStream
from siirl_dask.schema import (
    PARAMETER,
    PARAMETER_DATA,
    PARAMETER_DTYPE,
    PARAMETER_SHAPE,
    ROW_ID,
    TYPES,
    fields,
)
from siirl_dask.training import Trainer

_WEIGHT_COLUMNS = fields(PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE, PARAMETER_DATA)
_INDEX_COLUMNS = [ROW_ID, PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE]
_PARAMETERS = "parameters"  # in the node's state


def weights_in_parts(
    ctx: Context,
    table: pa.Table,
    *,
    max_bytes: int,
    lora: LoraConfig | None = None,
) -> RowStream:
    """Return what ``publish_weights`` publishes, in tables of at most ``max_bytes`` over all
    workers, or of one larger parameter.

    A table is made when it is asked for; every rank of a sharded model gathers every parameter. The
    first call in a run gathers them once more, for their shapes: engines refuse weights that do not
    fit before anything is loaded.
    """
    parameters = _parameters(ctx, lora)
    return RowStream(_parameter_index(parameters), _buckets(ctx, parameters, max_bytes, lora))


def weights_as_tensors(
    ctx: Context, table: pa.Table, *, lora: LoraConfig | None = None
) -> RowStream:
    """Return the same as tensors on the trainer's device, full on every rank, each gathered when
    it is asked for.
    """
    parameters = _parameters(ctx, lora)
    return RowStream(_parameter_index(parameters), _checked_weights(ctx, parameters, lora))


def _weights(ctx: Context, lora: LoraConfig | None) -> Iterable[tuple[str, Tensor]]:
    """Return what engines get: with ``lora`` the adapters, else all weights."""
    trainer: Trainer = ctx.resource
    if lora is not None and lora.rank:
        return trainer.adapters()
    return trainer.weights()


def _parameters(ctx: Context, lora: LoraConfig | None) -> list[Parameter]:
    """Return names, types and shapes of the weights, which stay the same through a run."""
    if _PARAMETERS not in ctx.state:
        ctx.state[_PARAMETERS] = [
            Parameter.of(name, tensor) for name, tensor in _weights(ctx, lora)
        ]
    parameters: list[Parameter] = ctx.state[_PARAMETERS]
    return parameters


def _parameter_index(parameters: Sequence[Parameter]) -> pa.Table:
    """Return the rows of all parameters, without their bytes."""
    no_data = pa.array([b""] * len(parameters), TYPES[PARAMETER_DATA])
    return parameter_rows(range(len(parameters)), parameters, no_data)


def _buckets(
    ctx: Context,
    parameters: Sequence[Parameter],
    max_bytes: int,
    lora: LoraConfig | None,
) -> Generator[pa.Table]:
    """Yield this worker's rows of each bucket of consecutive parameters."""
    tensors = _checked_weights(ctx, parameters, lora)
    for numbers in _bucket_ranges([parameter.nbytes for parameter in parameters], max_bytes):
        own = [number for number in numbers if number % ctx.rank.size == ctx.rank.rank]
        data = BinaryBuilder([parameters[number].nbytes for number in own])
        for number in numbers:
            tensor = next(tensors)
            if number in own:
                data.add(tensor)
            del tensor  # it may be gathered: one at a time
        yield parameter_rows(own, [parameters[number] for number in own], data.array())
        del data
    next(tensors, None)  # lets _checked_weights raise if there are more


def _checked_weights(
    ctx: Context, parameters: Sequence[Parameter], lora: LoraConfig | None
) -> Generator[Tensor]:
    """Yield the trainer's weights. TypeError when names, types or shapes are not those of
    ``parameters``.
    """
    weights = iter(_weights(ctx, lora))
    for expected in parameters:
        name, tensor = next(weights, ("nothing", torch.empty(0)))
        parameter = Parameter.of(name, tensor)
        if parameter != expected:
            raise TypeError(
                f"weights() gave {parameter} where {expected} was before: expected the same"
            )
        yield tensor
        del tensor  # it may be gathered: one at a time
    extra = next(weights, None)
    if extra is not None:
        name, _ = extra
        raise TypeError(
            f"weights() gave {name!r} as well, which was not there before: expected the same"
        )


def _bucket_ranges(sizes: Sequence[int], max_bytes: int) -> Iterator[range]:
    """Yield numbers of consecutive parameters of at most ``max_bytes`` together, or of a single
    larger one.
    """
    first = 0
    total = 0
    for number, size in enumerate(sizes):
        if number > first and total + size > max_bytes:
            yield range(first, number)
            first = number
            total = 0
        total += size
    if first < len(sizes):
        yield range(first, len(sizes))


@columns(
    writes=_WEIGHT_COLUMNS,
    new_rows=True,
    passes=False,
    stream=WeightSource(weights_in_parts, weights_as_tensors),
)
def publish_weights(ctx: Context, table: pa.Table, *, lora: LoraConfig | None = None) -> pa.Table:
    """Publish this worker's share of the parameters; the role's workers share the load evenly.

    With ``lora``, and a rank above 0, these are the adapters alone, for a ``load_weights`` with the
    same option. The rows are a copy, so the next update may begin.
    """
    numbers = []
    parameters = []
    tensors = []
    for number, (name, tensor) in enumerate(_weights(ctx, lora)):
        if number % ctx.rank.size == ctx.rank.rank:
            numbers.append(number)
            parameters.append(Parameter.of(name, tensor))
            tensors.append(tensor)
    data = BinaryBuilder([parameter.nbytes for parameter in parameters])
    for tensor in tensors:
        data.add(tensor)
    return parameter_rows(numbers, parameters, data.array())


def load_weights_in_parts(
    ctx: Context, parts: RowStream, *, lora: LoraConfig | None = None
) -> None:
    """Load weights one parameter after the other. PeerError when other parameters arrive than
    the index has.
    """
    _load(ctx, WeightStream(_shapes(parts.index), _received_weights(parts)), lora)


def load_weights_from_tensors(
    ctx: Context, parts: RowStream, *, lora: LoraConfig | None = None
) -> None:
    """Load weights from tensors that are on the engine's device already."""
    shapes = _shapes(parts.index)
    named_tensors = zip(shapes, parts.tables, strict=True)
    _load(ctx, WeightStream(shapes, named_tensors), lora)


def _load(ctx: Context, tensors: Iterable[tuple[str, Tensor]], lora: LoraConfig | None) -> None:
    """Give the engine weights, or with ``lora`` adapters; their version is the number of steps
    trained.
    """
    engine: RolloutEngine = behind(ctx.resource)
    if lora is None or not lora.rank:
        engine.load_weights(tensors, ctx.step)
        return
    if not isinstance(engine, TakesAdapters):
        raise TypeError(
            f"{type(engine).__name__} has no load_adapters: leave lora out of the options of "
            "publish_weights and load_weights, so that it gets weights with the adapters merged in"
        )
    engine.load_adapters(tensors, lora.alpha / lora.rank, ctx.step)


def _shapes(index: pa.Table) -> dict[str, list[int]]:
    """Return the shape of each parameter by its name."""
    rows = index.select([PARAMETER, PARAMETER_SHAPE]).to_pylist()
    return {row[PARAMETER]: row[PARAMETER_SHAPE] for row in rows}


def _received_weights(parts: RowStream) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as they arrive. PeerError when they differ from the index."""
    index = parts.index.select(_INDEX_COLUMNS)
    first = 0
    for table in parts.tables:
        expected = index.slice(first, table.num_rows)
        if not table.select(_INDEX_COLUMNS).equals(expected):
            raise PeerError(
                f"parameters {table[PARAMETER].to_pylist()} came otherwise than they were announced"
            )
        first += table.num_rows
        yield from tensors_of(table)
        del table  # frees its memory before the next one arrives


@columns(
    reads=[PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE, PARAMETER_DATA],
    stateful=True,
    stream=WeightSink(load_weights_in_parts, load_weights_from_tensors),
)
def load_weights(ctx: Context, table: pa.Table, *, lora: LoraConfig | None = None) -> pa.Table:
    """Load the weights into the engine; their version is the number of steps trained.

    With ``lora``, and a rank above 0, they are adapters of the weights in the engine's folder. The
    node needs all rows on each worker: rows=REPLICATED.
    """
    _load(ctx, tensors_of(table), lora)
    return table
