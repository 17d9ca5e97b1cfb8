"""Shares a table between processes: a source puts rows that all targets get into memory that its
host's processes map; a target reads them there, and acks them when it has dropped them.

The source does so once, however many targets there are; none of them makes a copy or has to ask,
since the statistics say where the columns lie. A target gets one slice per range of rows, a few
microseconds each, so this is for long rows such as parameters. Rows that have one owner are written
to where they belong instead (see ``pull``): that is one copy as well, and makes one piece. The
source reuses the memory when every target has dropped its last reference to it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import pyarrow as pa

from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.arena import (
    Arena,
    ArenaBlock,
    Attachments,
    Bytes,
    CannotMap,
)
from siirl_dask.coordinator.databuffer.ragged import (
    RaggedColumn,
    as_ragged,
    build_column,
    element_width,
)
from siirl_dask.coordinator.databuffer.row_lengths import (
    RowLengths,
    RowOrigin,
    SharedTable,
    other_columns_schema,
)
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.messages import TransitionKey, from_frames, to_frames
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge
from siirl_dask.schema import IDENTITY
from siirl_dask.tables import Ints

if TYPE_CHECKING:
    from siirl_dask.coordinator.databuffer.acks import Acks
    from siirl_dask.coordinator.databuffer.published import Published

logger = logging.getLogger("siirl_dask.coordinator")
_ALIGNMENT = 64
_HEAD_LENGTH = 4  # bytes


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
    others = [name for name in table.column_names if name not in known]
    packed = pack_others(table.select(others))
    *column_starts, others_start, end = _places(0, [*sizes.values(), len(packed)])
    block = arena.allocate(end)
    if block.segment.handle is None:
        return None
    starts = dict(zip(ragged, column_starts, strict=True))
    for name, chunks in ragged.items():
        start = starts[name]
        for chunk in chunks:
            size = _size(chunk)
            block.bytes[start : start + size] = chunk.values[:size]
            start += size
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
    aligned = bytearray()
    for piece in pieces:
        aligned += piece
        aligned += bytes(-len(piece) % _ALIGNMENT)
    return bytes(aligned)


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
    places = [start + -start % _ALIGNMENT]
    for size in sizes:
        end = places[-1] + size
        places.append(end + -end % _ALIGNMENT)
    return places


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


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of one source that are read where they lie."""

    source: str
    positions: Ints
    """[rows] positions in what the source published."""
    destinations: Ints
    """[rows] index of the same rows in the result."""
    columns: Mapping[str, pa.ChunkedArray]
    """Variable-length columns of all rows that the source published."""
    others: pa.Table
    """Other columns of the rows at ``positions``."""
    nbytes: int
    """Bytes of the rows in the variable-length columns."""


class SharedTableReader:
    """Reads what sources of this host share with one worker, itself included."""

    def __init__(
        self,
        worker: str,
        own_published: Callable[[TransitionKey], Awaitable[Published]],
        acks: Acks,
        transport_mode: TransportMode,
    ) -> None:
        """``own_published`` waits until this worker has published its rows of a transition, and
        returns them.
        """
        self._worker = worker
        self._own_published = own_published
        self._acks = acks
        self._transport_mode = transport_mode
        self._attachments = Attachments(writable=False)  # a target can spoil nobody else's rows

    async def read(self, edge: Edge, origin: RowOrigin) -> SharedRows | None:
        """Return an origin's rows; None when its worker shares nothing, or not with this process.

        PeerError when what it shares is no table of the edge.
        """
        if self._transport_mode is TransportMode.dask:
            return None
        worker = origin.worker
        lengths = origin.lengths
        if lengths is None or lengths.shared_table is None or not lengths.group_lengths:
            return None
        nbytes = 0
        for name, column_lengths in lengths.select(origin.positions).items():
            width = element_width(edge.schema.field(name).type)
            nbytes += int(column_lengths.sum()) * (width or 0)
        if worker == self._worker:
            published = await self._own_published(origin.key)
            columns = {name: published.shared_column(name) for name in lengths.offset_groups}
            others = published.other_columns(origin.positions)
        elif lengths.domain != shared_memory_domain():
            return None
        else:
            try:
                columns, all_others = self._map(edge, origin, lengths, lengths.shared_table)
                others = all_others.take(pa.array(origin.positions))
            except CannotMap as error:
                if self._transport_mode is TransportMode.shm:
                    raise PeerError(
                        f"data.transport=shm, but memory of worker {worker!r} cannot be read: "
                        f"{error}"
                    ) from error
                logger.warning(
                    "rows of worker %r are fetched, because its memory cannot be read: %s",
                    worker,
                    error,
                )
                return None
            except (pa.ArrowException, IndexError, PeerError) as error:
                # its frames refer to the memory, which would never be acked
                error.__traceback__ = None
                raise PeerError(
                    f"edge {edge.name}: what worker {worker!r} shares is no table: {error}"
                ) from error
        return SharedRows(
            source=worker,
            positions=origin.positions,
            destinations=origin.destinations,
            columns=columns,
            others=others,
            nbytes=nbytes,
        )

    def _map(
        self,
        edge: Edge,
        origin: RowOrigin,
        lengths: RowLengths,
        shared: SharedTable,
    ) -> tuple[dict[str, pa.ChunkedArray], pa.Table]:
        """Return the variable-length columns of all rows of a source over its memory, and a copy of
        the other ones.

        Offsets are this process's own, made from the lengths: a source that writes into its segment
        meanwhile can change values, and cannot make this process read outside of the segment.
        """
        assert lengths.group_lengths
        mapped = self._attachments.attach(shared.handle)
        hold = _Hold(mapped)
        ack = partial(self._acks.add_and_flush, origin.worker, origin.key, len(origin.positions))
        weakref.finalize(hold, _call_on_loop, asyncio.get_running_loop(), ack).atexit = False
        columns = {}
        for name, group in lengths.offset_groups.items():
            kind = edge.schema.field(name).type
            column_lengths = lengths.group_lengths[group]
            # the lengths are a peer's: integers could overflow
            elements = int(column_lengths.sum(dtype=np.float64))
            size = elements * (element_width(kind) or 0)
            start = shared.starts.get(name)
            if start is None or start % _ALIGNMENT or start + size > len(mapped):
                raise IndexError(
                    f"column {name!r} lies outside of the segment, or not at a multiple of "
                    f"{_ALIGNMENT}"
                )
            values = pa.foreign_buffer(mapped.ctypes.data + start, size, hold)
            columns[name] = build_column(kind, column_lengths, values)
        stop = shared.others_start + shared.others_size
        if stop > len(mapped):
            raise IndexError("the other columns lie outside of the segment")
        schema = other_columns_schema(edge.schema, lengths.offset_groups)
        return columns, _read_others(mapped[shared.others_start : stop], schema, lengths.rows)


class _Hold:
    """A target's hold on a source's rows: every buffer over their memory refers to it.

    When the last table, column or slice over the memory is gone, so is the hold, and its finalizer
    acks the rows. Only then may the source use the memory again. Until then it counts as unacked at
    the source, even after its iteration.
    """

    __slots__ = ("__weakref__", "mapped")

    def __init__(self, mapped: Bytes) -> None:
        self.mapped = mapped


def _call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call on the event loop, from whatever thread the garbage collector runs in: acks belong to
    the loop.
    """
    with suppress(RuntimeError):  # the loop is closed: the run is over
        loop.call_soon_threadsafe(call)


def _read_others(stream: Bytes, schema: pa.Schema, rows: int) -> pa.Table:
    """Return the other columns, from a copy that the source cannot change while it is validated."""
    if not len(schema):
        # a table without columns that has rows nevertheless
        return pa.table({"": pa.nulls(rows)}).select([])
    table = unpack_others(stream.tobytes(), schema)
    if table.num_rows != rows:
        raise pa.ArrowInvalid(f"{table.num_rows} rows of {schema.names} instead of {rows}")
    return table


def concat_slices(
    pieces: Sequence[tuple[Ints, Ints, pa.ChunkedArray]], kind: pa.DataType
) -> pa.ChunkedArray:
    """Return one column out of slices of several, without copying: a piece is (destinations,
    positions, column), and row ``positions[i]`` of its column goes to ``destinations[i]``.
    """
    counts = [len(positions) for _, positions, _ in pieces]
    order = np.argsort(np.concatenate([destinations for destinations, _, _ in pieces]))
    rows = np.concatenate([positions for _, positions, _ in pieces])[order]
    piece = np.repeat(np.arange(len(pieces)), counts)[order]
    # a slice ends where the next row is not the one behind it in the same piece
    is_next_row = rows[1:] == rows[:-1] + 1
    is_same_piece = piece[1:] == piece[:-1]
    begins = np.concatenate(([True], ~(is_next_row & is_same_piece)))
    starts = np.flatnonzero(begins)
    lengths = np.append(starts[1:], len(rows)) - starts
    chunks: list[pa.Array] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        _, _, column = pieces[piece[start]]
        chunks += column.slice(int(rows[start]), length).chunks
    return pa.chunked_array(chunks, kind)
