"""The result of a pull: memory laid out in its final order before any row arrives, so that each is put there once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.arena import Arena, Block, Segment
from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.borrowing import Borrowed, in_runs
from siirl_dask.coordinator.cells import Runs, cell_width, column_of, starts_of
from siirl_dask.coordinator.frames import Frame
from siirl_dask.coordinator.limits import physical_memory
from siirl_dask.coordinator.messages import pack_ints
from siirl_dask.coordinator.published import Published
from siirl_dask.errors import PeerError

_ONE_CHUNK = 2**31  # bytes: what is smaller has offsets of 32 bits in one chunk


@dataclass(frozen=True, slots=True)
class Part:
    """The rows that come from one source."""

    source: str
    rows: Ints
    """Positions in what the source published."""
    places: Ints
    """Of the same rows: index into the result."""
    lengths: Mapping[str, Ints]
    """Elements of each row, by column, of the columns that are runs of bytes."""
    row_bytes: int
    """Of the other columns, about, per row."""
    domain: str
    """See ``shared_memory_domain``."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message carries: rows of a part, by index into it, some columns of them, and perhaps the plain ones."""

    rows: Ints
    columns: Sequence[str]
    plain: bool
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How rows lie in the columns of a pattern, in elements."""

    lengths: Ints
    starts: Ints
    elements: int


@dataclass(frozen=True, slots=True)
class _Column:
    width: int
    layout: _Layout
    block: Block


class Assembly:
    """Rows of ``schema``, out of ``parts`` and what is ``borrowed``, which together have each place once; ``identity``
    is what is known of them already.
    """

    def __init__(
        self,
        schema: pa.Schema,
        identity: pa.Table,
        parts: Sequence[Part],
        arena: Arena,
        borrowed: Sequence[Borrowed] = (),
    ) -> None:
        self.schema = schema
        self._identity = identity
        self._count = identity.num_rows
        self._parts = parts
        self._borrowed = borrowed
        self._plain = [(one.places, one.plain) for one in borrowed]
        layouts = self._layouts()
        widths = {name: cell_width(schema.field(name).type) or 0 for name in layouts}
        total = sum(layout.elements * widths[name] for name, layout in layouts.items())
        if total > physical_memory():
            raise PeerError(f"{total} bytes of rows for this worker: more than its machine's memory")
        self._columns = {
            name: _Column(widths[name], layout, arena.allocate(layout.elements * widths[name]))
            for name, layout in layouts.items()
        }

    def put_own(self, part: Part, published: Published) -> None:
        """Bring the rows of this worker's own part."""
        moves: dict[tuple[int, int], Runs] = {}
        for name in part.lengths:
            column, (cells, pattern) = self._columns[name], published.column(name)
            key = (pattern, id(column.layout))
            if key not in moves:
                moves[key] = published.runs(pattern, part.rows, column.layout.starts[part.places])
            moves[key].move(cells.values, column.block.bytes, column.width)
        self.put_plain(part.places, published.plain(part.rows))

    def put(self, part: Part, rows: Ints, frames: Mapping[str, Frame]) -> None:
        """Bring rows of a part, by index into it, that came as a frame a column. PeerError for other sizes."""
        moves: dict[int, Runs] = {}
        for name, frame in frames.items():
            column, lengths = self._columns[name], part.lengths[name][rows]
            key = id(column.layout)
            if key not in moves:
                moves[key] = Runs(starts_of(lengths), column.layout.starts[part.places[rows]], lengths)
            if memoryview(frame).nbytes != moves[key].elements * column.width:
                raise PeerError(f"column {name!r} came as {memoryview(frame).nbytes} bytes: it was described otherwise")
            moves[key].move(np.frombuffer(frame, np.uint8), column.block.bytes, column.width)

    def put_plain(self, places: Ints, table: pa.Table) -> None:
        self._plain.append((places, table))

    def target(self, part: Part, rows: Ints) -> dict[str, Any] | None:
        """Where a process of this host shall write rows of the part; None where memory cannot be shared."""
        segments: list[Segment] = []
        layouts: list[_Layout] = []
        columns = []
        for column in (self._columns[name] for name in part.lengths):
            if column.block.segment not in segments:
                segments.append(column.block.segment)
            if column.layout not in layouts:
                layouts.append(column.layout)
            columns.append([segments.index(column.block.segment), column.block.offset, layouts.index(column.layout)])
        handles = [segment.handle.pack() for segment in segments if segment.handle]
        if len(handles) < len(segments):
            return None
        patterns = [pack_ints(layout.starts[part.places[rows]]) for layout in layouts]
        return {"handles": handles, "columns": columns, "patterns": patterns}

    def missing(self, part: Part, rows: Ints | slice = slice(None)) -> int:
        """Bytes of rows of a part, but for the plain columns."""
        elements = {id(lengths): int(lengths[rows].sum()) for lengths in part.lengths.values()}
        return sum(elements[id(lengths)] * self._columns[name].width for name, lengths in part.lengths.items())

    def chunks(self, part: Part, most: int) -> Iterator[Chunk]:
        """A part cut into messages of at most ``most`` bytes, or of one cell."""
        sizes = {name: found * self._columns[name].width for name, found in part.lengths.items()}
        ends = np.cumsum(np.sum([np.full(len(part.rows), part.row_bytes), *sizes.values()], axis=0))
        first = 0
        while first < len(part.rows):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
            rows, nbytes = np.arange(first, last), int(ends[last - 1]) - before
            if nbytes <= most or len(sizes) < 2:
                yield Chunk(rows, list(sizes), True, nbytes)
            else:
                for index, (name, size) in enumerate(sizes.items()):
                    yield Chunk(rows, [name], index == 0, int(size[first]))
            first = last

    @property
    def plain_bytes(self) -> int:
        return sum(table.nbytes for _, table in self._plain)

    def segments(self) -> set[Segment]:
        """Those that the result lies in."""
        return {column.block.segment for column in self._columns.values()}

    def abandon(self) -> None:
        """Let go of the memory of a result that will not be."""
        self._columns.clear()
        self._plain.clear()

    def table(self) -> pa.Table:
        """The result, once all parts are there."""
        columns = [self._column(field.name, field.type) for field in self.schema]
        return pa.table(columns, schema=self.schema)

    def _layouts(self) -> dict[str, _Layout]:
        """Of each column that is runs of bytes; columns that no source tells apart share one."""
        found: dict[tuple[int, ...], _Layout] = {}
        layouts = {}
        for name in self.schema.names:
            parts = [part for part in self._parts if name in part.lengths]
            key = tuple(id(part.lengths[name]) for part in parts)
            if parts and key not in found:
                lengths = np.zeros(self._count, np.int64)
                for part in parts:
                    lengths[part.places] = part.lengths[name]
                if lengths.sum(dtype=np.float64) > physical_memory():  # and integers cannot overflow below
                    raise PeerError(f"rows of column {name!r} are said to be longer than this machine's memory")
                found[key] = _Layout(lengths, starts_of(lengths), int(lengths.sum()))
            if parts:
                layouts[name] = found[key]
        return layouts

    def _column(self, name: str, kind: pa.DataType) -> pa.ChunkedArray:
        """A column that is in memory already, or came as plain rows, or both: where some sources' rows have nulls."""
        if name in self._identity.column_names:
            return self._identity[name]
        column = self._columns.get(name)
        found = column_of(kind, column.layout.lengths, column.block.buffer()) if column else pa.chunked_array([], kind)
        if any(name in one.columns for one in self._borrowed):
            return self._with_borrowed(name, kind, found)
        plain = [(places, table[name]) for places, table in self._plain if name in table.column_names]
        if not plain:
            return found
        index, after = np.arange(self._count), len(found)
        for places, _ in plain:
            index[places] = after + np.arange(len(places))
            after += len(places)
        whole = pa.chunked_array([*found.chunks, *(chunk for _, rows in plain for chunk in rows.chunks)], kind)
        whole = whole if np.array_equal(index, np.arange(len(whole))) else whole.take(pa.array(index))
        return whole.combine_chunks() if whole.nbytes < _ONE_CHUNK else whole

    def _with_borrowed(self, name: str, kind: pa.DataType, found: pa.ChunkedArray) -> pa.ChunkedArray:
        """A column that some sources lend."""
        here = [part.places for part in self._parts if name in part.lengths]
        pieces = [(places, places, found) for places in here]
        pieces += [(one.places, one.rows, one.columns[name]) for one in self._borrowed if name in one.columns]
        plain = ((places, table[name]) for places, table in self._plain if name in table.column_names)
        pieces += [(places, np.arange(len(places)), rows) for places, rows in plain]
        return in_runs(pieces, kind)
