"""What one worker offers of an edge's rows, and what it answers about them."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from siirl_dask.coordinator.arena import Arena, Attachments, shared_memory_domain, unpack_handle
from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.cells import Cells, cell_width, cells_of, move_runs, starts_of
from siirl_dask.coordinator.description import Description, find_patterns
from siirl_dask.coordinator.frames import Frame, to_frames
from siirl_dask.coordinator.messages import unpack_ints
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY


@dataclass(slots=True)
class Published:
    """A partition, split into columns whose rows are runs of bytes and the others, "plain" ones. Never changed."""

    statistics: pa.Table
    table: pa.Table | None
    """None when no rows move, and once every row has been taken."""
    left: int
    """Rows that are still to be taken, once per target when the edge replicates."""
    spilled: mmap.mmap | None = None
    """The file that the table is mapped from."""
    patterns: list[Ints] = field(default_factory=list, init=False)
    """See ``description``."""
    _cells: dict[str, Cells] | None = field(default=None, init=False)

    @property
    def rows(self) -> int:
        return int(self.statistics.num_rows)

    @property
    def nbytes(self) -> int:
        """In memory: nothing when it is spilled."""
        return 0 if self.table is None or self.spilled is not None else int(self.table.nbytes)

    def take(self, rows: int) -> None:
        """Count ``rows`` as taken; the table is freed when none is left."""
        self.left -= rows
        if self.left <= 0:
            self.table, self._cells, self.spilled = None, None, None

    def cells(self) -> dict[str, Cells]:
        """Of the columns that are runs of bytes and have no nulls. PeerError when the rows are gone."""
        table = self._table()
        if self._cells is None:
            found = ((name, _cells_of(table[name])) for name in table.column_names)
            self._cells = {name: cells for name, cells in found if cells is not None}
        return self._cells

    def describe(self, source: int, most: int) -> Description:
        """What is told of the rows along with their statistics, which is at most ``most`` bytes."""
        cells, table = self.cells(), self._table()
        columns, self.patterns = find_patterns(cells)
        plain = sum(table[name].nbytes for name in self._plain_names())
        known = self.patterns if sum(pattern.nbytes for pattern in self.patterns) <= most else None
        return Description(source, shared_memory_domain(), -(-plain // max(1, self.rows)), columns, known)

    def plain(self, rows: Ints) -> pa.Table:
        """The other columns of the rows."""
        return self._table().select(self._plain_names()).take(pa.array(rows))

    def plain_reply(self, rows: Ints, most: int) -> tuple[dict[str, Any], list[Frame], int]:
        """The plain columns as a header and frames, of the first rows: as many as fit into ``most`` bytes, at least
        one; and how many those are.
        """
        count = len(rows)
        if not self._plain_names():
            return {}, [], count
        plain = self.plain(rows)
        while plain.nbytes > most and count > 1:
            count = max(1, count * most // (2 * plain.nbytes))
            plain = self.plain(rows[:count])
        self.let_go()
        return *to_frames(plain), count

    def nbytes_of(self, rows: Ints, columns: Sequence[str]) -> int:
        cells = self.cells()
        return sum(int(cells[name].lengths[rows].sum()) * cells[name].width for name in columns)

    def gather(self, rows: Ints, columns: Sequence[str], arena: Arena) -> list[memoryview]:
        """A frame a column: the bytes of the rows, one row after the other."""
        cells = self.cells()
        frames: list[memoryview] = []
        for name in columns:
            column = cells[name]
            sizes = column.lengths[rows] * column.width
            block = arena.allocate(int(sizes.sum()))
            move_runs(column.values, column.starts[rows], block.bytes, starts_of(sizes), sizes)
            frames.append(memoryview(block.buffer()))
        self.let_go()
        return frames

    def write(self, rows: Ints, columns: Sequence[str], target: Mapping[str, Any], attachments: Attachments) -> None:
        """Put the bytes of the rows where the asker said, in its memory. PeerError for places outside of it."""
        cells = self.cells()
        try:
            segments = [attachments.attach(unpack_handle(handle)) for handle in target["handles"]]
            starts = [unpack_ints(pattern, 2**62, 2**40) for pattern in target["patterns"]]
            for name, (segment, base, pattern) in zip(columns, target["columns"], strict=True):
                column = cells[name]
                places = int(base) + starts[pattern][: len(rows)] * column.width
                sizes = column.lengths[rows] * column.width
                move_runs(column.values, column.starts[rows], segments[segment], places, sizes)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PeerError(f"refused to write rows: {error!r}") from error
        self.let_go()

    def let_go(self) -> None:
        """Pages of a spilled table that were read go back to the page cache, or they would count as this process's."""
        if self.spilled is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.spilled.madvise(mmap.MADV_DONTNEED)

    def _plain_names(self) -> list[str]:
        """What is no run of bytes and is not told by the statistics already."""
        known = (*self.cells(), *IDENTITY)
        return [name for name in self._table().column_names if name not in known]

    def _table(self) -> pa.Table:
        if self.table is None:
            raise PeerError("rows were asked for after every target had taken them")
        return self.table


def _cells_of(column: pa.ChunkedArray) -> Cells | None:
    if cell_width(column.type) is None:
        return None
    one = column.num_chunks == 1
    return cells_of(column.chunk(0) if one else pa.concat_arrays([pa.array([], column.type), *column.chunks]))


def spill(table: pa.Table, folder: str | None) -> tuple[pa.Table, mmap.mmap]:
    """The table, in an Arrow file that has no name and ends with this process, and the mapping it is read through."""
    with tempfile.TemporaryFile(dir=folder) as file:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return ipc.open_file(pa.py_buffer(mapped)).read_all(), mapped
