"""Turns an Arrow table into a small header and its own buffers, and back: no pickle, and no copy on
the way out.

A received table is checked before it is used: the receiver names the schema, and Arrow validates
every offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from siirl_dask.comms.wire import Frame
from siirl_dask.errors import DataError, PeerError

_LEAVES = (
    pa.types.is_primitive,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)


def check_types(schema: pa.Schema) -> None:
    """Raise DataError naming the first column whose type cannot move between workers."""
    for field in schema:
        if not _can_move(field.type):
            raise DataError(
                f"column {field.name!r} has type {field.type}, which cannot move between workers: "
                "expected numbers, booleans, strings, binary, times, or lists, maps and structs of "
                "them; cast it"
            )


def _can_move(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _can_move(kind.value_type)
    if types.is_map(kind):
        if not _can_move(kind.key_type):
            return False
        return _can_move(kind.item_type)
    if types.is_struct(kind):
        return all(_can_move(field.type) for field in kind)
    return any(is_leaf(kind) for is_leaf in _LEAVES)


def to_frames(table: pa.Table) -> tuple[dict[str, Any], list[Frame]]:
    """Return a header of plain data, and frames that are views of the table's own buffers."""
    frames: list[Frame] = []
    nodes: list[list[int]] = []
    for column in table.columns:
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        _flatten(array, nodes, frames)
    return {"rows": table.num_rows, "nodes": nodes}, frames


def _flatten(array: pa.Array, nodes: list[list[int]], frames: list[Frame]) -> None:
    """Append one node ``[length, nulls, frame index or -1 ...]`` for the array and for each
    child, depth first.
    """
    # a slice, whose buffers are those of its whole parent: this copies the slice alone
    if array.offset != 0:
        array = array.take(pa.array(range(len(array)), pa.int64()))
    children = list(_children(array))
    own = array.buffers()[: array.type.num_buffers]
    node = [len(array), array.null_count]
    for buffer in own:
        node.append(-1 if buffer is None else len(frames))
        if buffer is not None:
            frames.append(memoryview(buffer))
    nodes.append(node)
    for child in children:
        _flatten(child, nodes, frames)


def _children(array: pa.Array) -> Iterator[pa.Array]:
    kind = array.type
    if _is_list_like(kind):
        yield array.values
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield array.field(index)


def from_frames(header: dict[str, Any], frames: Sequence[Frame], schema: pa.Schema) -> pa.Table:
    """Return the table over the received buffers. PeerError for anything that is not a table of
    ``schema``.
    """
    try:
        nodes = iter(header["nodes"])
        arrays = [_build(field.type, nodes, frames) for field in schema]
        if next(nodes, None) is not None:
            raise ValueError("more columns than expected")
        for name, array in zip(schema.names, arrays, strict=True):
            if len(array) != header["rows"]:
                raise ValueError(
                    f"column {name!r} has {len(array)} rows instead of {header['rows']}"
                )
            array.validate(full=True)
        return pa.table(arrays, schema=schema)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        OverflowError,
        StopIteration,
        pa.ArrowException,
    ) as error:
        raise PeerError(
            f"received frames that are no table of {schema.names}: {error!r}"
        ) from error


def _build(kind: pa.DataType, nodes: Iterator[Sequence[int]], frames: Sequence[Frame]) -> pa.Array:
    length, nulls, *indices = next(nodes)
    if length < 0 or nulls < 0 or nulls > length or len(indices) != kind.num_buffers:
        raise ValueError(f"bad node for type {kind}")
    if any(not -1 <= index < len(frames) for index in indices):
        raise ValueError(f"frame out of range for type {kind}")
    buffers = [None if index == -1 else pa.py_buffer(frames[index]) for index in indices]
    children = [_build(field.type, nodes, frames) for field in _child_fields(kind)]
    return pa.Array.from_buffers(kind, length, buffers, nulls, children=children or None)


def _child_fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(index) for index in range(kind.num_fields)]


def _is_list_like(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_map(kind)
    )
