"""Columns whose rows are runs of bytes (lists of numbers, text, binary), and moving such rows from place to place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.coordinator.arena import Bytes
from siirl_dask.coordinator.balance import Ints

_SHORT = 512  # bytes: shorter runs are moved by index, all at once, longer ones each with a copy of its own


def cell_width(kind: pa.DataType) -> int | None:
    """Bytes of one element of a row, for the types whose rows are runs of bytes; None for all others."""
    types = pa.types
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return 1
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        value = kind.value_type
        if types.is_primitive(value) and value.bit_width % 8 == 0:
            return int(value.bit_width // 8)
    return None


@dataclass(frozen=True, slots=True)
class Cells:
    """Where each row of a column without nulls lies: row r is ``lengths[r]`` elements from byte ``starts[r]``."""

    values: Bytes
    starts: Ints
    lengths: Ints
    width: int


def cells_of(array: pa.Array) -> Cells | None:
    """None where rows are no runs of bytes, or some rows or elements are null."""
    width = cell_width(array.type)
    if width is None or array.null_count:
        return None
    kind, rows = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        bounds = (array.offset + np.arange(rows + 1, dtype=np.int64)) * kind.list_size
    else:
        large = pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        offsets = array.buffers()[1]
        dtype = np.dtype(np.int64 if large else np.int32)
        if offsets is None or offsets.size == 0:
            bounds = np.zeros(rows + 1, np.int64)
        else:
            bounds = np.frombuffer(offsets, dtype, rows + 1, array.offset * dtype.itemsize).astype(np.int64)
    if pa.types.is_nested(kind):
        child = array.values
        if child.null_count:
            return None
        data, first = child.buffers()[1], child.offset
    else:
        data, first = array.buffers()[2], 0
    values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return Cells(values, (bounds[:-1] + first) * width, np.diff(bounds), width)


def array_of(kind: pa.DataType, lengths: Ints, values: pa.Buffer) -> pa.Array:
    """The column of ``kind`` whose rows, of ``lengths`` elements, lie in ``values`` one after the other."""
    rows, total = len(lengths), int(lengths.sum())
    if pa.types.is_fixed_size_list(kind):
        child = pa.Array.from_buffers(kind.value_type, total, [None, values])
        return pa.Array.from_buffers(kind, rows, [None], children=[child])
    large = pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    offsets = np.zeros(rows + 1, np.int64 if large else np.int32)
    np.cumsum(lengths, out=offsets[1:])
    if pa.types.is_nested(kind):
        child = pa.Array.from_buffers(kind.value_type, total, [None, values])
        return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets)], children=[child])
    array = pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets), values])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array.validate(full=True)  # text must be UTF-8
    return array


def starts_of(lengths: Ints) -> Ints:
    """Where each of several runs begins when they lie one after the other."""
    return np.cumsum(lengths) - lengths


def move_runs(source: Bytes, starts: Ints, target: Bytes, places: Ints, sizes: Ints) -> None:
    """Copy ``sizes[i]`` bytes from ``source[starts[i]:]`` to ``target[places[i]:]``, for every i.

    IndexError, before anything is copied, when a run lies outside.
    """
    if len(sizes) == 0:
        return
    inside = starts.min() >= 0 and places.min() >= 0 and sizes.min() >= 0
    if not inside or (starts + sizes).max() > len(source) or (places + sizes).max() > len(target):
        raise IndexError("a run of bytes lies outside of the memory it was to be copied from or to")
    starts, places, sizes = _merge(starts, places, sizes)
    if int(sizes.sum()) >= _SHORT * len(sizes):
        for start, place, size in zip(starts.tolist(), places.tolist(), sizes.tolist(), strict=True):
            target[place : place + size] = source[start : start + size]
    else:
        _move_short(source, starts, target, places, sizes)


def _merge(starts: Ints, places: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs that follow each other on both sides become one."""
    ends = starts + sizes
    joined = (starts[1:] == ends[:-1]) & (places[1:] == places[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return starts[first], places[first], np.add.reduceat(sizes, first)


def _move_short(source: Bytes, starts: Ints, target: Bytes, places: Ints, sizes: Ints) -> None:
    unit = _common_unit(source, target, starts, places, sizes)
    from_units, to_units = _as_units(source, unit), _as_units(target, unit)
    starts, places, counts = starts // unit, places // unit, sizes // unit
    step = max(1, 2**22 * len(counts) // max(1, int(counts.sum())))  # rows at once: 4 Mi elements of index
    for first in range(0, len(counts), step):
        here = slice(first, first + step)
        within = np.arange(counts[here].sum()) - np.repeat(starts_of(counts[here]), counts[here])
        to = within + np.repeat(places[here], counts[here])
        to_units[to] = from_units[within + np.repeat(starts[here], counts[here])]


def _common_unit(source: Bytes, target: Bytes, *runs: Ints) -> int:
    """Bytes that can be moved together: all runs, and the memory itself, are aligned to them."""
    joint = np.bitwise_or.reduce([int(np.bitwise_or.reduce(run)) for run in runs])
    joint = int(joint) | source.ctypes.data | target.ctypes.data
    return next(unit for unit in (8, 4, 2, 1) if joint % unit == 0)


def _as_units(memory: Bytes, unit: int) -> NDArray[np.generic]:
    return memory[: len(memory) // unit * unit].view(f"u{unit}")
