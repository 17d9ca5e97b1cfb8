"""Rows that are read where they lie: a source puts what all targets get into memory that its host's processes map.

It does so once, however many targets there are, and none of them has a copy of its own or has to ask: where the columns
lie is told along with the statistics. A target gets a slice for each run of rows, which takes some microseconds, so
this is for long rows, such as parameters. Rows that have one owner are written to where they belong instead (see
``pulling``): that is one copy as well, and in one piece. The memory is used again when every target has let go of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from siirl_dask.coordinator.arena import Arena, Block, Handle, unpack_handle
from siirl_dask.coordinator.cells import Cells, cell_width, cells_of, column_of
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Loan:
    """Where a source's rows lie in a segment of it, in bytes from the segment's start."""

    handle: Handle
    columns: Mapping[str, int]
    """The first row of each column whose rows are runs of bytes; the others follow it."""
    plain: int
    plain_size: int
    """An Arrow stream of the other columns; nothing where there are none."""

    def pack(self) -> list[Any]:
        return [self.handle.pack(), dict(self.columns), self.plain, self.plain_size]


def unpack_loan(value: object) -> Loan | None:
    """PeerError for what is no loan."""
    match value:
        case None:
            return None
        case [list() | tuple() as handle, dict(columns), int(plain), int(plain_size)] if (
            all(isinstance(name, str) and isinstance(start, int) and start >= 0 for name, start in columns.items())
            and min(plain, plain_size) >= 0
        ):
            return Loan(unpack_handle(list(handle)), columns, plain, plain_size)
    raise PeerError(f"received {str(value)[:120]!r} for a loan")


def lend(table: pa.Table, arena: Arena, least: int) -> tuple[pa.Table, Loan] | None:
    """The same rows in memory that peers can map. None where a row takes less than ``least`` bytes on average in the
    columns that are runs of bytes, or there are none.
    """
    found = {name: _chunks_of(table[name]) for name in table.column_names if name not in IDENTITY}
    runs = {name: chunks for name, chunks in found.items() if chunks is not None}
    sizes = {name: sum(map(_size, chunks)) for name, chunks in runs.items()}
    rest = table.select([name for name in found if name not in runs])
    total = sum(sizes.values())
    if not runs or total < least * table.num_rows * len(runs):
        return None
    stream = _stream_of(rest)
    places = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in (*sizes.values(), stream.size))])
    block = arena.allocate(int(places[-1]))
    if block.segment.handle is None:
        return None
    starts = dict(zip(runs, places.tolist(), strict=False))
    for name, chunks in runs.items():
        _copy(chunks, block, starts[name])
    plain = int(places[len(runs)])
    block.bytes[plain : plain + stream.size] = np.frombuffer(stream, np.uint8)
    loan = Loan(
        block.segment.handle,
        {name: block.offset + start for name, start in starts.items()},
        block.offset + plain,
        stream.size,
    )
    return _over(table, runs, sizes, starts, block), loan


def _chunks_of(column: pa.ChunkedArray) -> list[Cells] | None:
    """None where some rows are no runs of bytes."""
    if cell_width(column.type) is None:
        return None
    chunks = [cells_of(chunk) for chunk in column.chunks]
    known = [chunk for chunk in chunks if chunk is not None]
    return known if len(known) == len(chunks) else None


def _size(cells: Cells) -> int:
    return int(cells.lengths.sum()) * cells.width


def _stream_of(table: pa.Table) -> pa.Buffer:
    if not table.num_columns:
        return pa.py_buffer(b"")
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _copy(chunks: Sequence[Cells], block: Block, start: int) -> None:
    for cells in chunks:
        size = _size(cells)
        block.bytes[start : start + size] = cells.values[:size]
        start += size


def _over(
    table: pa.Table,
    runs: Mapping[str, Sequence[Cells]],
    sizes: Mapping[str, int],
    starts: Mapping[str, int],
    block: Block,
) -> pa.Table:
    """The same table over the block, which then lives as long as it."""
    whole = block.buffer()
    for name, chunks in runs.items():
        lengths = np.concatenate([np.zeros(0, np.int64), *(cells.lengths for cells in chunks)])
        column = column_of(table.schema.field(name).type, lengths, whole.slice(starts[name], sizes[name]))
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table
