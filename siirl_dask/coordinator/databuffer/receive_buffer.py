"""The receive buffer: the memory of a pull's result, laid out in its final order before any row
arrives.

Each row is then put into its place once, by whichever way it travels. Nothing is sorted or joined
afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.comms.wire import Frame, Pieces
from siirl_dask.coordinator.databuffer.arena import Arena, ArenaBlock, SharedSegment
from siirl_dask.coordinator.databuffer.early import EarlyBatch
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.ragged import (
    CopyPlan,
    build_column,
    element_width,
    starts_of,
)
from siirl_dask.coordinator.databuffer.shared_tables import SharedRows, concat_slices
from siirl_dask.coordinator.host import physical_memory
from siirl_dask.coordinator.transport.messages import TransitionKey, pack_ints
from siirl_dask.errors import PeerError
from siirl_dask.schema import ROW_ID
from siirl_dask.tables import Ints

_ONE_CHUNK = 2**31  # bytes: offsets of 32 bits span whatever is smaller, so it fits into one chunk


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of a pull that are fetched from one worker (see ``RowOrigin``), and how long they
    are.
    """

    source: str
    key: TransitionKey
    """Key under which the worker published them."""
    positions: Ints
    """[rows] positions in what the source published."""
    destinations: Ints
    """[rows] index of the same rows in the result."""
    lengths: Mapping[str, Ints]
    """[rows] elements of each row, by variable-length column; one array object for all columns
    of an offset group."""
    other_row_bytes: int
    """Bytes of a row in the other columns, about."""
    domain: str
    """The source's ``shared_memory_domain``."""
    arrived: Collection[str] = ()
    """Variable-length columns whose values are here already."""

    @property
    def wanted(self) -> list[str]:
        """Variable-length columns that are still to be fetched."""
        return [name for name in self.lengths if name not in self.arrived]

    def select(self, rows: Ints) -> SourceRows:
        """Return some of the rows, by index."""
        return replace(
            self,
            positions=self.positions[rows],
            destinations=self.destinations[rows],
            lengths={name: lengths[rows] for name, lengths in self.lengths.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequest:
    """The part of a source's rows that one request asks for."""

    rows: Ints
    """[rows] index into the source's rows."""
    columns: Sequence[str]
    others: bool
    """True when the reply carries the other columns as well."""
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _GroupLayout:
    """The places of all rows of the result in the columns of an offset group, in elements."""

    lengths: Ints
    starts: Ints
    elements: int


@dataclass(frozen=True, slots=True)
class _Column:
    width: int
    layout: _GroupLayout
    block: ArenaBlock


class ReceiveBuffer:
    """Memory for rows of ``schema``, from ``sources`` and ``shared``, which together have each row
    of the result once.

    ``identity`` holds the columns that are known from the statistics, in the result's order.
    PeerError when the lengths that sources announced exceed the machine's memory.
    """

    def __init__(
        self,
        schema: pa.Schema,
        identity: pa.Table,
        sources: Sequence[SourceRows],
        arena: Arena,
        shared: Sequence[SharedRows] = (),
    ) -> None:
        self.schema = schema
        self._identity = identity
        self._count = identity.num_rows
        self._sources = sources
        self._shared = shared
        self._others = [(rows.destinations, rows.others) for rows in shared]
        layouts = self._lay_out()
        widths = {name: element_width(schema.field(name).type) or 0 for name in layouts}
        total = sum(layout.elements * widths[name] for name, layout in layouts.items())
        if total > physical_memory():
            raise PeerError(
                f"{total} bytes of rows for this worker: more than its machine's memory"
            )
        self._columns: dict[str, _Column] = {}
        for name, layout in layouts.items():
            block = arena.allocate(layout.elements * widths[name])
            self._columns[name] = _Column(widths[name], layout, block)

    def copy_own(self, rows: SourceRows, published: Published) -> None:
        """Copy this worker's own rows to their places."""
        own_columns = published.columns()
        plans: dict[tuple[int, int], CopyPlan] = {}
        for name in rows.lengths:
            column = self._columns[name]
            group = own_columns.group_of[name]
            key = (group, id(column.layout))
            if key not in plans:
                targets = column.layout.starts[rows.destinations]
                plans[key] = own_columns.copy_plan(group, rows.positions, targets)
            plans[key].copy(own_columns.ragged[name].values, column.block.bytes, column.width)
        self.add_others(rows.destinations, published.other_columns(rows.positions))

    def copy_frames(self, rows: SourceRows, subset: Ints, frames: Mapping[str, Frame]) -> None:
        """Copy a subset of a source's rows to their places, from one frame a column. PeerError for
        other sizes than the source has announced.
        """
        plans: dict[int, CopyPlan] = {}
        for name, frame in frames.items():
            nbytes = memoryview(frame).nbytes
            plan, column = self._plan(rows, subset, name, nbytes, plans)
            plan.copy(np.frombuffer(frame, np.uint8), column.block.bytes, column.width)

    def places(
        self,
        rows: SourceRows,
        subset: Ints,
        columns: Sequence[str],
        sizes: Sequence[int],
    ) -> list[Pieces | None]:
        """Return the places of a subset of a source's rows, for a frame of ``sizes`` bytes of each
        of the columns; None where rows are short, and are copied there by ``copy_frames``.
        PeerError for other sizes than the source has announced.
        """
        plans: dict[int, CopyPlan] = {}
        found: list[Pieces | None] = []
        for name, nbytes in zip(columns, sizes, strict=True):
            plan, column = self._plan(rows, subset, name, nbytes, plans)
            found.append(plan.target_pieces(column.block.bytes, column.width))
        return found

    def _plan(
        self,
        rows: SourceRows,
        subset: Ints,
        name: str,
        nbytes: int,
        plans: dict[int, CopyPlan],
    ) -> tuple[CopyPlan, _Column]:
        """Return the plan that takes a column's frame of ``nbytes`` to its places, from ``plans``
        by layout, and the column. PeerError where its rows have other lengths.
        """
        column = self._columns[name]
        lengths = rows.lengths[name][subset]
        key = id(column.layout)
        if key not in plans:
            targets = column.layout.starts[rows.destinations[subset]]
            plans[key] = CopyPlan(starts_of(lengths), targets, lengths)
        if nbytes != plans[key].elements * column.width:
            raise PeerError(
                f"column {name!r} came as {nbytes} bytes: its row lengths were told otherwise"
            )
        return plans[key], column

    def row_ids(self, rows: SourceRows) -> Ints:
        """Return the ids of a source's rows."""
        ids: Ints = self._identity[ROW_ID].to_numpy()[rows.destinations]
        return ids

    def copy_early(self, rows: SourceRows, batch: EarlyBatch) -> None:
        """Copy those of a source's rows that arrived early to their places; others in the batch are
        another worker's.

        PeerError where their lengths are not those that the source has announced since.
        """
        _, at, in_batch = np.intersect1d(
            self.row_ids(rows), batch.row_ids, assume_unique=True, return_indices=True
        )
        for name, frame in batch.frames.items():
            column = self._columns[name]
            lengths = batch.lengths[name]
            if not np.array_equal(lengths[in_batch], rows.lengths[name][at]):
                raise PeerError(
                    f"worker {rows.source!r} sent rows of column {name!r} early with other lengths"
                )
            places = column.layout.starts[rows.destinations[at]]
            plan = CopyPlan(starts_of(lengths)[in_batch], places, lengths[in_batch])
            plan.copy(np.frombuffer(frame, np.uint8), column.block.bytes, column.width)

    def add_others(self, destinations: Ints, table: pa.Table) -> None:
        """Take the other columns of some rows; they are put in order at the end."""
        self._others.append((destinations, table))

    def write_target(self, rows: SourceRows, subset: Ints) -> dict[str, Any] | None:
        """Return where a process of this host shall write a subset of a source's rows: handles of
        segments; for each column its segment, its first byte there and its layout; and for each
        layout the rows' starts in elements.

        None where memory cannot be shared.
        """
        segments: list[SharedSegment] = []
        layouts: list[_GroupLayout] = []
        columns = []
        for name in rows.wanted:
            column = self._columns[name]
            segment = column.block.segment
            if segment not in segments:
                segments.append(segment)
            if column.layout not in layouts:
                layouts.append(column.layout)
            segment_index = segments.index(segment)
            layout_index = layouts.index(column.layout)
            columns.append([segment_index, column.block.offset, layout_index])
        handles = [segment.handle.pack() for segment in segments if segment.handle]
        if len(handles) < len(segments):
            return None
        starts = [pack_ints(layout.starts[rows.destinations[subset]]) for layout in layouts]
        return {"handles": handles, "columns": columns, "starts": starts}

    def ragged_bytes(self, rows: SourceRows, subset: Ints | slice = slice(None)) -> int:
        """Return bytes of a source's rows, or of a subset, in the variable-length columns."""
        elements: dict[int, int] = {}  # by the array of lengths, which an offset group shares
        total = 0
        for name in rows.wanted:
            lengths = rows.lengths[name]
            if id(lengths) not in elements:
                elements[id(lengths)] = int(lengths[subset].sum())
            total += elements[id(lengths)] * self._columns[name].width
        return total

    def split_into_requests(self, rows: SourceRows, max_bytes: int) -> Iterator[RowRequest]:
        """Divide a source's rows into requests of at most ``max_bytes``; a larger row is fetched
        column by column.
        """
        sizes = {name: rows.lengths[name] * self._columns[name].width for name in rows.wanted}
        other_sizes = np.full(len(rows.positions), rows.other_row_bytes)
        row_sizes = np.sum([other_sizes, *sizes.values()], axis=0)
        ends = np.cumsum(row_sizes)
        first = 0
        while first < len(rows.positions):
            before = int(ends[first - 1]) if first else 0
            fitting = int(np.searchsorted(ends, before + max_bytes, side="right"))
            last = max(first + 1, fitting)
            subset = np.arange(first, last)
            nbytes = int(ends[last - 1]) - before
            if nbytes <= max_bytes or len(sizes) < 2:
                yield RowRequest(rows=subset, columns=list(sizes), others=True, nbytes=nbytes)
            else:
                for index, (name, size) in enumerate(sizes.items()):
                    yield RowRequest(
                        rows=subset,
                        columns=[name],
                        others=index == 0,
                        nbytes=int(size[first]),
                    )
            first = last

    @property
    def other_bytes(self) -> int:
        """Bytes of the other columns that have arrived."""
        return sum(table.nbytes for _, table in self._others)

    def segments(self) -> set[SharedSegment]:
        """Return the segments that the result lies in."""
        return {column.block.segment for column in self._columns.values()}

    def discard(self) -> None:
        """Drop the memory of a result that failed. An exception's traceback may keep this object
        for long.
        """
        self._columns.clear()
        self._others.clear()

    def table(self) -> pa.Table:
        """Return the result over the memory, once all rows are there. ArrowException when they
        are no such table.
        """
        columns = [self._column(field.name, field.type) for field in self.schema]
        return pa.table(columns, schema=self.schema)

    def _lay_out(self) -> dict[str, _GroupLayout]:
        """Return the layout of each variable-length column.

        Columns share a layout where every source has them in one offset group, which is where their
        arrays of lengths are the same objects (see ``RowLengths.select``).
        """
        by_arrays: dict[tuple[int, ...], _GroupLayout] = {}
        layouts = {}
        for name in self.schema.names:
            sources = [rows for rows in self._sources if name in rows.lengths]
            if not sources:
                continue
            key = tuple(id(rows.lengths[name]) for rows in sources)
            if key not in by_arrays:
                # 0 for rows that are shared, or have the column among others
                lengths = np.zeros(self._count, np.int64)
                for rows in sources:
                    lengths[rows.destinations] = rows.lengths[name]
                # as floats: integers from a peer could overflow
                if lengths.sum(dtype=np.float64) > physical_memory():
                    raise PeerError(
                        f"rows of column {name!r} are said to be longer than this machine's memory"
                    )
                by_arrays[key] = _GroupLayout(lengths, starts_of(lengths), int(lengths.sum()))
            layouts[name] = by_arrays[key]
        return layouts

    def _column(self, name: str, kind: pa.DataType) -> pa.ChunkedArray:
        """Return one column of the result. Its rows are in the buffer, or arrived among the other
        columns, or both: where a column has nulls on some sources only.
        """
        if name in self._identity.column_names:
            return self._identity[name]
        column = self._columns.get(name)
        if column is None:
            buffered = pa.chunked_array([], kind)
        else:
            buffered = build_column(kind, column.layout.lengths, column.block.buffer())
        others = []
        for places, table in self._others:
            if name in table.column_names:
                others.append((places, table[name]))
        if any(name in rows.columns for rows in self._shared):
            return self._with_shared(name, kind, buffered, others)
        if not others:
            return buffered
        chunks = list(buffered.chunks)
        index = np.arange(self._count)  # of each row of the result: its row in all chunks together
        end = len(buffered)
        for places, rows in others:
            chunks.extend(rows.chunks)
            index[places] = end + np.arange(len(places))
            end += len(places)
        joined = pa.chunked_array(chunks, kind)
        if not np.array_equal(index, np.arange(len(joined))):
            joined = joined.take(pa.array(index))
        if joined.nbytes >= _ONE_CHUNK:
            return joined
        return joined.combine_chunks()

    def _with_shared(
        self,
        name: str,
        kind: pa.DataType,
        buffered: pa.ChunkedArray,
        others: Sequence[tuple[Ints, pa.ChunkedArray]],
    ) -> pa.ChunkedArray:
        """Return a column that some sources share: slices of theirs, of the buffer and of the
        other columns.
        """
        pieces: list[tuple[Ints, Ints, pa.ChunkedArray]] = []
        for source in self._sources:
            if name in source.lengths:
                pieces.append((source.destinations, source.destinations, buffered))
        for shared in self._shared:
            if name in shared.columns:
                pieces.append((shared.destinations, shared.positions, shared.columns[name]))
        for places, rows in others:
            pieces.append((places, np.arange(len(places)), rows))
        return concat_slices(pieces, kind)
