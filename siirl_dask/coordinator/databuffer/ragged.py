"""Variable-length columns (lists of numbers, text, binary), and copying rows of them from place to
place.

The rows of such a column lie in one buffer, one after the other, so their lengths say where each
begins. Columns whose rows have the same lengths (an offset group: a response's ids, log-probs,
values) are copied by one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.comms.wire import Pieces
from siirl_dask.coordinator.databuffer.arena import Bytes
from siirl_dask.tables import Ints

# bytes: shorter ranges are copied by index, all in one go, longer ones each by a copy of its own
_SHORT = 256
# bytes: copied in a tenth of a millisecond, worth letting go of the interpreter's lock for
_LONG = 2**20
_INDEX = 2**22  # elements of such an index at once
# bytes: rows as long as this on average are sent from where they lie and received into their places;
# what the kernel and the interpreter do for each piece costs less than two copies of it
_PIECE = 2**12


@lru_cache(maxsize=256)
def element_width(kind: pa.DataType) -> int | None:
    """Return the bytes of one element of a row, 1 for text and binary; None for types of other
    columns.
    """
    types = pa.types
    if (
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
    ):
        return 1
    if types.is_list(kind) or types.is_large_list(kind):
        value = kind.value_type
        if types.is_primitive(value) and value.bit_width % 8 == 0:
            return int(value.bit_width // 8)
    return None


@dataclass(frozen=True, slots=True)
class RaggedColumn:
    """A variable-length column without nulls: row r is ``lengths[r]`` elements of ``width``
    bytes at ``starts[r]``.
    """

    values: Bytes
    """Bytes that have the rows; there may be more after the last."""
    lengths: Ints
    """[rows] elements."""
    starts: Ints
    """[rows] elements before each row: rows follow one another, but for those that several rows
    share."""
    width: int


def as_ragged(array: pa.Array) -> RaggedColumn | None:
    """Return a view of the array's buffers; None where its type is another, or a row or an
    element is null.
    """
    width = element_width(array.type)
    if width is None or array.null_count:
        return None
    kind = array.type
    rows = len(array)
    dtype = np.dtype(np.int64 if _has_large_offsets(kind) else np.int32)
    offsets = array.buffers()[1]
    if offsets is None or offsets.size == 0:  # Arrow allows no offsets where there are no rows
        bounds = np.zeros(rows + 1, np.int64)
    else:
        bounds = np.frombuffer(offsets, dtype, rows + 1, array.offset * dtype.itemsize).astype(
            np.int64
        )
    if pa.types.is_nested(kind):
        child = array.values
        if child.null_count:
            return None
        data = child.buffers()[1]
        first = child.offset + int(bounds[0])
    else:
        data = array.buffers()[2]
        first = int(bounds[0])
    values = np.empty(0, np.uint8)
    if data is not None and data.size:
        values = np.frombuffer(data, np.uint8)[first * width :]
    return RaggedColumn(
        values,
        lengths=np.diff(bounds),
        starts=bounds[:-1] - bounds[0],
        width=width,
    )


def as_shared_ragged(chunks: Sequence[pa.Array]) -> RaggedColumn | None:
    """Return a view of chunks that are slices of one array, such as one row again and again;
    None for any others.
    """
    columns: list[RaggedColumn] = []
    for chunk in chunks:
        column = as_ragged(chunk) if _data_of(chunk) == _data_of(chunks[0]) else None
        if column is None:
            return None
        columns.append(column)
    filled = [column for column in columns if len(column.values)]
    if not filled:
        return None
    # all end where the array's values do
    first = max(filled, key=lambda column: len(column.values))
    starts = []
    for column in columns:
        before = (len(first.values) - len(column.values)) // first.width
        starts.append(column.starts + before)
    lengths = [column.lengths for column in columns]
    return RaggedColumn(first.values, np.concatenate(lengths), np.concatenate(starts), first.width)


def _data_of(array: pa.Array) -> tuple[int, int] | None:
    """Return address and size of the buffer that has the array's values."""
    if pa.types.is_nested(array.type):
        array = array.values
    data = array.buffers()[-1]
    return None if data is None else (data.address, data.size)


def build_column(
    kind: pa.DataType,
    lengths: Ints,
    values: pa.Buffer,
    max_elements: int = 2**31 - 1,
) -> pa.ChunkedArray:
    """Return the column of ``kind`` whose rows, of ``lengths`` elements, lie in ``values`` one
    after the other.

    It has one chunk, unless its offsets are of 32 bits and cannot span all rows: then each chunk
    has at most ``max_elements``. ArrowInvalid for a row that no such chunk can hold.
    """
    ends = np.cumsum(lengths)
    if lengths.max(initial=0) > max_elements and not _has_large_offsets(kind):
        raise pa.ArrowInvalid(
            f"a row of {lengths.max()} elements: a column of {kind} holds at most {max_elements}"
        )
    if len(ends) == 0 or ends[-1] <= max_elements or _has_large_offsets(kind):
        return pa.chunked_array([_build_array(kind, lengths, values)])
    width = element_width(kind)
    if width is None:
        width = 0
    chunks = []
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, before + max_elements, side="right"))
        last = max(first + 1, fitting)
        elements = int(ends[last - 1]) - before
        part = values.slice(before * width, elements * width)
        chunks.append(_build_array(kind, lengths[first:last], part))
        first = last
    return pa.chunked_array(chunks)


def _build_array(kind: pa.DataType, lengths: Ints, values: pa.Buffer) -> pa.Array:
    rows = len(lengths)
    offsets = np.zeros(rows + 1, np.int64 if _has_large_offsets(kind) else np.int32)
    np.cumsum(lengths, out=offsets[1:])
    if not pa.types.is_nested(kind):
        array = pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets), values])
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            array.validate(full=True)  # text must be UTF-8; numbers and binary have no wrong bytes
        return array
    child = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, values])
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets)], children=[child])


def starts_of(lengths: Ints) -> Ints:
    """Return where each row begins when rows of these lengths lie one after the other. [N] ->
    [N].
    """
    return np.cumsum(lengths) - lengths


class CopyPlan:
    """Copies ``lengths[i]`` elements from ``sources[i]`` on to ``targets[i]`` on, in any column of
    an offset group.

    All three are [N] in elements; the columns' widths make them bytes. Lengths may come from a
    peer: a plan is checked as a whole before its first byte is copied.
    """

    def __init__(self, sources: Ints, targets: Ints, lengths: Ints) -> None:
        """Raise IndexError where a number is negative."""
        if len(lengths) and min(sources.min(), targets.min(), lengths.min()) < 0:
            raise IndexError("rows that begin before the first element, or have a negative length")
        self._read_end = int((sources + lengths).max(initial=0))
        self._write_end = int((targets + lengths).max(initial=0))
        self._sources, self._targets, self._lengths = _merge(sources, targets, lengths)
        self.elements = int(lengths.sum())

    def source_pieces(self, source: Bytes, width: int) -> Pieces | None:
        """Return the rows where they lie in ``source``, for elements of ``width`` bytes; None where
        they are short, and a copy costs less.

        The targets are those of a frame: one row after the other. IndexError where rows lie outside
        of ``source``.
        """
        return self._pieces(source, self._sources, self._read_end, width)

    def target_pieces(self, target: Bytes, width: int) -> Pieces | None:
        """Return the rows' places in ``target``, for a frame that has one row after the other; None
        where they are short. IndexError where places lie outside of ``target``.
        """
        return self._pieces(target, self._targets, self._write_end, width)

    def _pieces(self, memory: Bytes, starts: Ints, end: int, width: int) -> Pieces | None:
        if end * width > len(memory):
            raise IndexError("rows lie outside of the memory they were to be moved from or to")
        if self.elements * width < _PIECE * max(1, len(self._lengths)):
            return None
        view = memory.data
        firsts = (starts * width).tolist()
        sizes = (self._lengths * width).tolist()
        pieces = []
        for first, size in zip(firsts, sizes, strict=True):
            if size:
                pieces.append(view[first : first + size])
        return Pieces(pieces)

    def copy(self, source: Bytes, target: Bytes, width: int) -> None:
        """Copy elements of ``width`` bytes. IndexError, before anything is copied, where rows
        lie outside of either.
        """
        if self._read_end * width > len(source) or self._write_end * width > len(target):
            raise IndexError("rows lie outside of the memory they were to be copied from or to")
        mean = self.elements * width / max(1, len(self._lengths))
        if mean < _SHORT:
            self._copy_by_index(source, target, width)
            return
        slices = zip(
            (self._sources * width).tolist(),
            (self._targets * width).tolist(),
            (self._lengths * width).tolist(),
            strict=True,
        )
        if mean >= _LONG:
            for start, place, size in slices:
                target[place : place + size] = source[start : start + size]
        else:
            # numpy lets go of the interpreter's lock for each slice, and gets it back only when the
            # thread that took it is interrupted, up to 5 ms later; a memoryview keeps it.
            writable = target.data
            readable = source.data
            for start, place, size in slices:
                writable[place : place + size] = readable[start : start + size]

    def _copy_by_index(self, source: Bytes, target: Bytes, width: int) -> None:
        """Copy with one index per element: a slice per row would cost more than the few bytes in
        it.
        """
        unit = 1
        if width in (1, 2, 4, 8) and (source.ctypes.data | target.ctypes.data) % width == 0:
            unit = width
        times = width // unit  # units of an element
        from_units = _as_units(source, unit)
        to_units = _as_units(target, unit)
        # so many at once: bounds the index
        indices = max(1, self.elements * times)
        rows = max(1, _INDEX * len(self._lengths) // indices)
        for first in range(0, len(self._lengths), rows):
            batch = slice(first, first + rows)
            lengths = self._lengths[batch] * times
            sources = self._sources[batch] * times
            targets = self._targets[batch] * times
            within = np.arange(lengths.sum()) - np.repeat(starts_of(lengths), lengths)
            read = within + np.repeat(sources, lengths)
            written = within + np.repeat(targets, lengths)
            to_units[written] = from_units[read]


def _as_units(memory: Bytes, unit: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a view of memory as unsigned integers of ``unit`` bytes, without a rest at its end."""
    whole = len(memory) // unit * unit
    return memory[:whole].view(f"u{unit}")


def _merge(sources: Ints, targets: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Join rows that follow each other on both sides, which one copy can take."""
    if len(lengths) == 0:
        return sources, targets, lengths
    lengths_before = lengths[:-1]
    source_follows = sources[1:] == sources[:-1] + lengths_before
    target_follows = targets[1:] == targets[:-1] + lengths_before
    begins = np.concatenate(([True], ~(source_follows & target_follows)))
    first = np.flatnonzero(begins)
    return sources[first], targets[first], np.add.reduceat(lengths, first)


def _has_large_offsets(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    )
