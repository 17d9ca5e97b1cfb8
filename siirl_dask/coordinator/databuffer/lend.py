"""Shares a table between processes: a source puts rows that all targets get into memory that its
host's processes map.

It does so once, however many targets there are; none of them makes a copy or has to ask, since the
statistics say where the columns lie. A target gets one slice per range of rows, a few microseconds
each, so this is for long rows such as parameters. Rows that have one owner are written to where
they belong instead (see ``pull``): that is one copy as well, and makes one piece. The source reuses
the memory when every target has dropped its last reference to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.databuffer.arena import Arena, ArenaBlock, Handle, unpack_handle
from siirl_dask.coordinator.databuffer.ragged import (
    RaggedColumn,
    as_ragged,
    build_column,
    element_width,
)
from siirl_dask.coordinator.transport.frames import from_frames, to_frames
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY

ALIGNMENT = 64
_HEAD_LENGTH = 4  # bytes


@dataclass(frozen=True, slots=True)
class SharedTable:
    """The place of a source's rows in one of its segments, in bytes from the segment's start."""

    handle: Handle
    starts: Mapping[str, int]
    """First byte of each variable-length column; its rows follow one another."""
    others_start: int
    """First byte of the other columns (see ``pack_others``)."""
    others_size: int
    """Bytes of them, 0 where there are no other columns."""

    def pack(self) -> list[Any]:
        return [self.handle.pack(), dict(self.starts), self.others_start, self.others_size]


def unpack_shared_table(value: object) -> SharedTable | None:
    """Return what ``SharedTable.pack`` packed, or None for None. PeerError when ``value`` is
    neither.
    """
    match value:
        case None:
            return None
        case [list() | tuple() as handle, dict(starts), int(others_start), int(others_size)] if (
            all(
                isinstance(name, str) and isinstance(start, int) and start >= 0
                for name, start in starts.items()
            )
            and min(others_start, others_size) >= 0
        ):
            return SharedTable(unpack_handle(list(handle)), starts, others_start, others_size)
    raise PeerError(f"received {str(value)[:120]!r} for a shared table")


def share(table: pa.Table, arena: Arena, min_row_bytes: int) -> tuple[pa.Table, SharedTable] | None:
    """Copy the table into memory that peers can map, and return the same table over it, with where
    it lies.

    None where that does not pay: a row has less than ``min_row_bytes`` a variable-length column on
    average, or there are no such columns. None as well where the system shares no memory.
    """
    ragged = {}
    for name in table.column_names:
        chunks = _ragged_chunks(name, table)
        if chunks is not None:
            ragged[name] = chunks
    sizes = {}
    for name, chunks in ragged.items():
        sizes[name] = sum(_size(chunk) for chunk in chunks)
    if not ragged or sum(sizes.values()) < min_row_bytes * table.num_rows * len(ragged):
        return None
    known = (*ragged, *IDENTITY)
    packed = pack_others(table.select([name for name in table.column_names if name not in known]))
    *column_starts, others_start, end = _places(0, [*sizes.values(), len(packed)])
    block = arena.allocate(end)
    if block.segment.handle is None:
        return None
    starts = dict(zip(ragged, column_starts, strict=True))
    for name, chunks in ragged.items():
        _copy(chunks, block, starts[name])
    block.bytes[others_start : others_start + len(packed)] = np.frombuffer(packed, np.uint8)
    shared = SharedTable(
        handle=block.segment.handle,
        starts={name: block.offset + start for name, start in starts.items()},
        others_start=block.offset + others_start,
        others_size=len(packed),
    )
    return _over_block(table, ragged, sizes, starts, block), shared


def _ragged_chunks(name: str, table: pa.Table) -> list[RaggedColumn] | None:
    """Return a column's chunks; None where it is an identity column, which travels with the
    statistics, or another.
    """
    if name in IDENTITY or element_width(table[name].type) is None:
        return None
    chunks: list[RaggedColumn] = []
    for array in table[name].chunks:
        chunk = as_ragged(array)
        if chunk is None:
            return None
        chunks.append(chunk)
    return chunks


def _size(column: RaggedColumn) -> int:
    return int(column.lengths.sum()) * column.width


def pack_others(table: pa.Table) -> bytes:
    """Return a table as a head and its frames, each aligned; empty for one without columns.

    An Arrow stream may be compressed: a peer that reads a few bytes of one could unpack gigabytes.
    """
    if not table.num_columns:
        return b""
    header, frames = to_frames(table)
    views = [memoryview(frame).cast("B") for frame in frames]
    head = msgpack.packb([header, [view.nbytes for view in views]])
    pieces = [len(head).to_bytes(_HEAD_LENGTH, "little") + head, *views]
    return b"".join(bytes(piece) + bytes(-len(piece) % ALIGNMENT) for piece in pieces)


def unpack_others(packed: bytes, schema: pa.Schema) -> pa.Table:
    """Return what ``pack_others`` packed. PeerError for anything that is no table of ``schema``."""
    try:
        start = _HEAD_LENGTH + int.from_bytes(packed[:_HEAD_LENGTH], "little")
        header, sizes = msgpack.unpackb(packed[_HEAD_LENGTH:start])
        if any(not isinstance(size, int) or size < 0 for size in sizes):
            raise ValueError(f"bytes of its frames: {str(sizes)[:80]}")
        places = _places(start, sizes)
        if places[-1] > len(packed):
            raise ValueError(f"{places[-1]} bytes of frames in {len(packed)}")
        view = memoryview(packed)
        frames = [view[place : place + size] for place, size in zip(places, sizes, strict=False)]
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(f"other columns that are no table of {schema.names}: {error!r}") from error
    return from_frames(header, frames, schema)


def _places(start: int, sizes: Sequence[int]) -> list[int]:
    """Return where each of several aligned pieces begins, the first at ``start``, and where the
    last one ends.
    """
    places = [-(-start // ALIGNMENT) * ALIGNMENT]
    for size in sizes:
        places.append(-(-(places[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return places


def _copy(chunks: Sequence[RaggedColumn], block: ArenaBlock, start: int) -> None:
    for chunk in chunks:
        size = _size(chunk)
        block.bytes[start : start + size] = chunk.values[:size]
        start += size


def _over_block(
    table: pa.Table,
    ragged: Mapping[str, Sequence[RaggedColumn]],
    sizes: Mapping[str, int],
    starts: Mapping[str, int],
    block: ArenaBlock,
) -> pa.Table:
    """Return the table with its variable-length columns over the block, which then lives as long as
    the table: the node's own copy can be freed, and what is published is what peers read.
    """
    whole = block.buffer()
    for name, chunks in ragged.items():
        lengths = np.concatenate([np.zeros(0, np.int64), *(chunk.lengths for chunk in chunks)])
        column = build_column(
            table.schema.field(name).type, lengths, whole.slice(starts[name], sizes[name])
        )
        table = table.set_column(
            table.schema.get_field_index(name), table.schema.field(name), column
        )
    return table
