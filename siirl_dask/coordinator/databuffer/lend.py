"""Shares a table between processes: a source puts rows that all targets get into memory that its host's processes map.

It does so once, however many targets there are; none of them makes a copy or has to ask, since the statistics tell
where the columns lie. A target gets one slice per range of rows, a few microseconds each, so this is for long rows such
as parameters. Rows that have one owner are written to where they belong instead (see ``pull``): that is one copy as
well, and gives one piece. The source reuses the memory when every target has dropped its last reference to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from siirl_dask.coordinator.databuffer.arena import Arena, Block, Handle, unpack_handle
from siirl_dask.coordinator.databuffer.ragged import RaggedColumn, as_ragged, build_column, element_width
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SharedTable:
    """Tells where a source's rows lie in one of its segments, in bytes from the segment's start."""

    handle: Handle
    starts: Mapping[str, int]
    """First byte of each variable-length column; its rows follow one another."""
    others_start: int
    """First byte of an Arrow stream that holds the other columns."""
    others_size: int
    """Bytes of that stream, 0 where there are no other columns."""

    def pack(self) -> list[Any]:
        return [self.handle.pack(), dict(self.starts), self.others_start, self.others_size]


def unpack_shared_table(value: object) -> SharedTable | None:
    """Return what ``SharedTable.pack`` packed, or None for None. PeerError when ``value`` is neither."""
    match value:
        case None:
            return None
        case [list() | tuple() as handle, dict(starts), int(others_start), int(others_size)] if (
            all(isinstance(name, str) and isinstance(start, int) and start >= 0 for name, start in starts.items())
            and min(others_start, others_size) >= 0
        ):
            return SharedTable(unpack_handle(list(handle)), starts, others_start, others_size)
    raise PeerError(f"received {str(value)[:120]!r} for a shared table")


def share(table: pa.Table, arena: Arena, min_row_bytes: int) -> tuple[pa.Table, SharedTable] | None:
    """Copy the table into memory that peers can map, and return the same table over it, with where it lies.

    None where that does not pay: a row has less than ``min_row_bytes`` a variable-length column on average, or there
    are no such columns. None as well where the system shares no memory.
    """
    ragged = {name: chunks for name in table.column_names if (chunks := _ragged_chunks(name, table)) is not None}
    sizes = {name: sum(map(_size, chunks)) for name, chunks in ragged.items()}
    others = table.select([name for name in table.column_names if name not in ragged and name not in IDENTITY])
    if not ragged or sum(sizes.values()) < min_row_bytes * table.num_rows * len(ragged):
        return None
    stream = _stream_of(others)
    places = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in (*sizes.values(), stream.size))])
    block = arena.allocate(int(places[-1]))
    if block.segment.handle is None:
        return None
    starts = dict(zip(ragged, places.tolist(), strict=False))
    for name, chunks in ragged.items():
        _copy(chunks, block, starts[name])
    others_start = int(places[len(ragged)])
    block.bytes[others_start : others_start + stream.size] = np.frombuffer(stream, np.uint8)
    shared = SharedTable(
        block.segment.handle,
        {name: block.offset + start for name, start in starts.items()},
        block.offset + others_start,
        stream.size,
    )
    return _over_block(table, ragged, sizes, starts, block), shared


def _ragged_chunks(name: str, table: pa.Table) -> list[RaggedColumn] | None:
    """Return a column's chunks; None where it is an identity column, which travels with the statistics, or another."""
    if name in IDENTITY or element_width(table[name].type) is None:
        return None
    chunks = [as_ragged(chunk) for chunk in table[name].chunks]
    known = [chunk for chunk in chunks if chunk is not None]
    return known if len(known) == len(chunks) else None


def _size(column: RaggedColumn) -> int:
    return int(column.lengths.sum()) * column.width


def _stream_of(table: pa.Table) -> pa.Buffer:
    if not table.num_columns:
        return pa.py_buffer(b"")
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _copy(chunks: Sequence[RaggedColumn], block: Block, start: int) -> None:
    for chunk in chunks:
        size = _size(chunk)
        block.bytes[start : start + size] = chunk.values[:size]
        start += size


def _over_block(
    table: pa.Table,
    ragged: Mapping[str, Sequence[RaggedColumn]],
    sizes: Mapping[str, int],
    starts: Mapping[str, int],
    block: Block,
) -> pa.Table:
    """Return the table with its variable-length columns over the block, which then lives as long as the table: the
    node's own copy can be freed, and what is published is what peers read.
    """
    whole = block.buffer()
    for name, chunks in ragged.items():
        lengths = np.concatenate([np.zeros(0, np.int64), *(chunk.lengths for chunk in chunks)])
        column = build_column(table.schema.field(name).type, lengths, whole.slice(starts[name], sizes[name]))
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table
