"""Reads shared tables: a target's columns over the memory of a source, and the ack when it has
dropped them.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.arena import Attachments, Bytes, CannotMap
from siirl_dask.coordinator.databuffer.lend import ALIGNMENT, SharedTable, unpack_others
from siirl_dask.coordinator.databuffer.published import Acks, Published
from siirl_dask.coordinator.databuffer.ragged import build_column, element_width
from siirl_dask.coordinator.databuffer.row_lengths import (
    RowLengths,
    RowOrigin,
    other_columns_schema,
)
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge
from siirl_dask.tables import Ints

logger = logging.getLogger("siirl_dask.coordinator")


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
        nbytes = sum(
            int(column_lengths.sum()) * (element_width(edge.schema.field(name).type) or 0)
            for name, column_lengths in lengths.select(origin.positions).items()
        )
        if worker == self._worker:
            published = await self._own_published(origin.key)
            columns = {name: published.shared_column(name) for name in lengths.offset_groups}
            others = published.other_columns(origin.positions)
            return _shared_rows(origin, columns, others, nbytes)
        if lengths.domain != shared_memory_domain():
            return None
        try:
            columns, all_others = self._map(edge, origin, lengths, lengths.shared_table)
            others = all_others.take(pa.array(origin.positions))
            return _shared_rows(origin, columns, others, nbytes)
        except CannotMap as error:
            if self._transport_mode is TransportMode.shm:
                raise PeerError(
                    f"data.transport=shm, but memory of worker {worker!r} cannot be read: {error}"
                ) from error
            logger.warning(
                "rows of worker %r are fetched, because its memory cannot be read: %s",
                worker,
                error,
            )
            return None
        except (pa.ArrowException, IndexError, PeerError) as error:
            error.__traceback__ = None  # its frames refer to the memory, which would never be acked
            raise PeerError(
                f"edge {edge.name}: what worker {worker!r} shares is no table: {error}"
            ) from error

    def _map(
        self, edge: Edge, origin: RowOrigin, lengths: RowLengths, shared: SharedTable
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
            if start is None or start % ALIGNMENT or start + size > len(mapped):
                raise IndexError(
                    f"column {name!r} lies outside of the segment, or not at a multiple of "
                    f"{ALIGNMENT}"
                )
            columns[name] = build_column(kind, column_lengths, _buffer(hold, start, size))
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


def _buffer(hold: _Hold, start: int, size: int) -> pa.Buffer:
    return pa.foreign_buffer(hold.mapped.ctypes.data + start, size, hold)


def _shared_rows(
    origin: RowOrigin, columns: Mapping[str, pa.ChunkedArray], others: pa.Table, nbytes: int
) -> SharedRows:
    return SharedRows(
        source=origin.worker,
        positions=origin.positions,
        destinations=origin.destinations,
        columns=columns,
        others=others,
        nbytes=nbytes,
    )


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
