"""Columns whose rows are runs of bytes (lists of numbers, text, binary), and moving such rows from place to place.

Rows of a column lie one after the other, so the lengths say where each begins, and columns of equal lengths (a pattern)
are moved alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.arena import Bytes
from siirl_dask.coordinator.balance import Ints

_SHORT = 256  # bytes: shorter runs are moved by index, all at once, longer ones each with a copy of its own
_LONG = 2**20  # bytes: a tenth of a millisecond, for which others get the interpreter's lock
_INDEX = 2**22  # elements of such an index at once


@lru_cache(maxsize=256)
def cell_width(kind: pa.DataType) -> int | None:
    """Bytes of one element of a row, for the types whose rows are runs of bytes; None for all others."""
    types = pa.types
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return 1
    if types.is_list(kind) or types.is_large_list(kind):
        value = kind.value_type
        if types.is_primitive(value) and value.bit_width % 8 == 0:
            return int(value.bit_width // 8)
    return None


@dataclass(frozen=True, slots=True)
class Cells:
    """A column without nulls: row r is ``lengths[r]`` elements of ``width`` bytes, and follows row r - 1."""

    values: Bytes
    """From the first row on."""
    lengths: Ints
    width: int


def cells_of(array: pa.Array) -> Cells | None:
    """None where rows are no runs of bytes, or some rows or elements are null."""
    width = cell_width(array.type)
    if width is None or array.null_count:
        return None
    kind, rows = array.type, len(array)
    dtype, offsets = np.dtype(np.int64 if _has_large_offsets(kind) else np.int32), array.buffers()[1]
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
    return Cells(values[(int(bounds[0]) + first) * width :], np.diff(bounds), width)


def column_of(kind: pa.DataType, lengths: Ints, values: pa.Buffer, most: int = 2**31 - 1) -> pa.ChunkedArray:
    """The column of ``kind`` whose rows, of ``lengths`` elements, lie in ``values`` one after the other.

    In one chunk, but where its offsets are of 32 bits: then each chunk has at most ``most`` elements.
    """
    ends = np.cumsum(lengths)
    if lengths.max(initial=0) > most and not _has_large_offsets(kind):
        raise pa.ArrowInvalid(f"a row of {lengths.max()} elements: a column of {kind} holds at most {most}")
    if len(ends) == 0 or ends[-1] <= most or _has_large_offsets(kind):
        return pa.chunked_array([_array_of(kind, lengths, values)])
    chunks, first, width = [], 0, cell_width(kind) or 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        part = values.slice(before * width, (int(ends[last - 1]) - before) * width)
        chunks.append(_array_of(kind, lengths[first:last], part))
        first = last
    return pa.chunked_array(chunks)


def _array_of(kind: pa.DataType, lengths: Ints, values: pa.Buffer) -> pa.Array:
    rows = len(lengths)
    offsets = np.zeros(rows + 1, np.int64 if _has_large_offsets(kind) else np.int32)
    np.cumsum(lengths, out=offsets[1:])
    if not pa.types.is_nested(kind):
        array = pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets), values])
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            array.validate(full=True)  # text must be UTF-8
        return array
    child = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, values])
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets)], children=[child])


def starts_of(lengths: Ints) -> Ints:
    """Where each of several runs begins when they lie one after the other."""
    return np.cumsum(lengths) - lengths


class Runs:
    """``sizes[i]`` elements from ``starts[i]`` on, to be moved to ``places[i]`` and on, in any columns of a pattern."""

    def __init__(self, starts: Ints, places: Ints, sizes: Ints) -> None:
        """IndexError where something is negative."""
        if len(sizes) and min(starts.min(), places.min(), sizes.min()) < 0:
            raise IndexError("a run before the first element")
        self._reads = int((starts + sizes).max(initial=0))
        self._writes = int((places + sizes).max(initial=0))
        self._starts, self._places, self._sizes = _merge(starts, places, sizes)
        self.elements = int(sizes.sum())

    def move(self, source: Bytes, target: Bytes, width: int) -> None:
        """IndexError, before anything is copied, when a run lies outside of either."""
        if self._reads * width > len(source) or self._writes * width > len(target):
            raise IndexError("a run lies outside of the memory it was to be copied from or to")
        mean = self.elements * width / max(1, len(self._sizes))
        if mean < _SHORT:
            self._move_short(source, target, width)
            return
        runs = (array * width for array in (self._starts, self._places, self._sizes))
        each = zip(*(array.tolist() for array in runs), strict=True)
        if mean >= _LONG:
            for start, place, size in each:
                target[place : place + size] = source[start : start + size]
        else:  # numpy would let go of the interpreter's lock for each run, and wait for it again while others compute
            to, whence = target.data, source.data
            for start, place, size in each:
                to[place : place + size] = whence[start : start + size]

    def _move_short(self, source: Bytes, target: Bytes, width: int) -> None:
        aligned = width in (1, 2, 4, 8) and (source.ctypes.data | target.ctypes.data) % width == 0
        unit, times = (width, 1) if aligned else (1, width)
        from_units = source[: len(source) // unit * unit].view(f"u{unit}")
        to_units = target[: len(target) // unit * unit].view(f"u{unit}")
        rows = max(1, _INDEX * len(self._sizes) // max(1, self.elements * times))
        for first in range(0, len(self._sizes), rows):
            here = slice(first, first + rows)
            starts, places, sizes = (array[here] * times for array in (self._starts, self._places, self._sizes))
            within = np.arange(sizes.sum()) - np.repeat(starts_of(sizes), sizes)
            to_units[within + np.repeat(places, sizes)] = from_units[within + np.repeat(starts, sizes)]


def _merge(starts: Ints, places: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs that follow each other on both sides become one."""
    if len(sizes) == 0:
        return starts, places, sizes
    joined = (starts[1:] == starts[:-1] + sizes[:-1]) & (places[1:] == places[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return starts[first], places[first], np.add.reduceat(sizes, first)


def large_kind(kind: pa.DataType) -> pa.DataType:
    """The type with the same rows and offsets of 64 bits, of one that ``cell_width`` knows."""
    types = pa.types
    if types.is_list(kind):
        return pa.large_list(kind.value_field)
    if types.is_string(kind):
        return pa.large_string()
    return pa.large_binary() if types.is_binary(kind) else kind


def _has_large_offsets(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind))
