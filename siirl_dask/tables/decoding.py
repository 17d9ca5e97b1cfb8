"""Decodes columns of a dataset: values one by one, where files have dictionaries, runs, and lists
that are views.

Arrow's own cast from a list view to a list reads beyond its buffers: lists were empty, or others'
(pyarrow 26).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.schema import decoded, path_steps


def decode_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return the column's values in the type ``kind``, which nests as the column's own type does.

    ArrowInvalid for values that it cannot hold.
    """
    return pa.chunked_array([decode_array(chunk, kind) for chunk in column.chunks], kind)


def decoded_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column as it is, or its values one by one where it has runs or lists that are
    views.
    """
    if needs_decoding(column.type):
        return decode_column(column, decoded(column.type))
    return column


def values_at(table: pa.Table, path: str) -> pa.ChunkedArray:
    """Return the values at ``path`` (see ``schema.path_steps``), decoded one by one.

    KeyError where the table has no such column, ArrowInvalid where its structs have no such field.
    """
    column, *inner = path_steps(path, table.column_names)
    values = decoded_column(table[column])
    if inner:
        return pc.struct_field(values, inner)
    return values


def needs_decoding(kind: pa.DataType) -> bool:
    """Return whether a type is, or nests, one that Arrow does not cast."""
    if isinstance(kind, pa.BaseExtensionType):
        return needs_decoding(kind.storage_type)
    if pa.types.is_run_end_encoded(kind) or _is_list_view(kind):
        return True
    if pa.types.is_dictionary(kind):
        return needs_decoding(kind.value_type)
    return any(needs_decoding(kind.field(index).type) for index in range(kind.num_fields))


def decode_array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return an array's values in the type ``kind``, which nests as the array's own type does.

    ArrowInvalid for values that it cannot hold.
    """
    stored = array.type
    types = pa.types
    if not needs_decoding(stored):
        return array.cast(kind)
    if isinstance(stored, pa.BaseExtensionType):
        return decode_array(array.storage, kind)
    if types.is_run_end_encoded(stored):
        rows = np.arange(array.offset, array.offset + len(array))
        runs = np.searchsorted(array.run_ends.to_numpy(), rows, side="right")
        return decode_array(array.values, kind).take(pa.array(runs))
    if types.is_dictionary(stored):
        return decode_array(array.dictionary, kind).take(array.indices)
    if _is_list_view(stored) or types.is_list(stored) or types.is_large_list(stored):
        return _list(array, kind)
    if types.is_fixed_size_list(stored):
        size = stored.list_size
        items = decode_array(
            array.values.slice(array.offset * size, len(array) * size), kind.value_type
        )
        return pa.FixedSizeListArray.from_arrays(items, type=kind, mask=array.is_null())
    if types.is_struct(stored):
        fields = [decode_array(array.field(index), field.type) for index, field in enumerate(kind)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if types.is_map(stored):
        return _map(array, kind)
    return array.cast(kind)


def _list(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the lists of an array, whose items may lie anywhere, with their items one after the
    other.
    """
    is_null = array.is_null().to_numpy(zero_copy_only=False)
    starts = array.offsets.to_numpy()
    if _is_list_view(array.type):
        sizes = array.sizes.to_numpy()
    else:
        sizes = np.diff(starts)
        starts = starts[:-1]
    sizes = np.where(is_null, 0, sizes).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    places = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes)
    items = decode_array(array.values, kind.value_type).take(pa.array(places, pa.int64()))
    mask = array.is_null()
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(
            pa.array(ends, pa.int64()), items, type=kind, mask=mask
        )
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items, type=kind, mask=mask)


def _map(array: pa.MapArray, kind: pa.MapType) -> pa.Array:
    starts = array.offsets.to_numpy()
    first = int(starts[0])
    entries = int(starts[-1]) - first
    keys = decode_array(array.keys.slice(first, entries), kind.key_type)
    items = decode_array(array.items.slice(first, entries), kind.item_type)
    offsets = pa.array(starts - first, pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))
