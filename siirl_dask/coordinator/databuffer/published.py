"""What one worker offers of an edge's rows, and what it answers about them."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from siirl_dask.coordinator.arena import Arena, Attachments, shared_memory_domain, unpack_handle
from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.cells import Cells, Runs, cell_width, cells_of, large_kind, starts_of
from siirl_dask.coordinator.description import Description
from siirl_dask.coordinator.frames import Frame, to_frames
from siirl_dask.coordinator.lending import Loan, lend
from siirl_dask.coordinator.messages import unpack_ints
from siirl_dask.coordinator.statistics import Lines
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY


@dataclass(frozen=True, slots=True)
class _Split:
    """A table's columns: those that are runs of bytes, by pattern of lengths, and the "plain" ones."""

    cells: dict[str, Cells]
    pattern_of: dict[str, int]
    lengths: list[Ints]
    """Of each pattern: elements of each row."""
    starts: list[Ints]
    """Of each pattern: elements before each row."""
    plain: list[str]
    """What is no run of bytes, or has nulls, and is not told by the statistics already."""
    row_bytes: int
    """Of the plain columns, about, per row."""

    @staticmethod
    def of(table: pa.Table) -> _Split:
        found = {name: _cells_of(table[name]) for name in table.column_names if name not in IDENTITY}
        cells = {name: column for name, column in found.items() if column is not None}
        numbers: dict[bytes, int] = {}
        pattern_of = {name: numbers.setdefault(c.lengths.tobytes(), len(numbers)) for name, c in cells.items()}
        lengths = [np.frombuffer(pattern, np.int64) for pattern in numbers]
        plain = [name for name in found if name not in cells]
        row_bytes = -(-sum(table[name].nbytes for name in plain) // max(1, table.num_rows))
        return _Split(cells, pattern_of, lengths, list(map(starts_of, lengths)), plain, row_bytes)


@dataclass(slots=True)
class Published:
    """A partition, never changed."""

    statistics: Lines
    table: pa.Table | None
    """None when no rows move, and once every row has been taken."""
    left: int
    """Rows that are still to be taken, once per target when the edge replicates."""
    spilled: mmap.mmap | None = None
    """The file that the table is mapped from."""
    loan: Loan | None = None
    """Where targets on this host read the rows; those count as taken when the targets have let go of them."""
    gone: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once every row has been taken, or nobody will."""
    _split: _Split | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.left == 0:
            self.gone.set()

    @property
    def rows(self) -> int:
        return len(self.statistics)

    @property
    def nbytes(self) -> int:
        """In memory: nothing when it is spilled."""
        return 0 if self.table is None or self.spilled is not None else int(self.table.nbytes)

    @property
    def is_lent(self) -> bool:
        """Peers may still read it, though its turn be over."""
        return self.loan is not None and self.table is not None

    @property
    def copied(self) -> int:
        """Bytes of the columns that have to be put together before rows of them can be moved."""
        table = self._table()
        return sum(int(column.nbytes) for column in table.columns if column.num_chunks != 1)

    @property
    def row_bytes(self) -> int:
        """Of the columns that are no runs of bytes, about, per row."""
        return self._columns().row_bytes

    def take(self, rows: int) -> None:
        """Count ``rows`` as taken; the table is freed when none is left."""
        self.left -= rows
        if self.left <= 0:
            self.table, self._split, self.spilled = None, None, None
            self.gone.set()

    def lend(self, arena: Arena, least: int) -> None:
        """Let targets on this host read the rows where they lie, if that is worth while (see ``lending``)."""
        if (lent := lend(self._table(), arena, least)) is not None:
            self.table, self.loan = lent

    def lent_column(self, name: str) -> pa.ChunkedArray:
        """Of all rows, in shared memory."""
        return self._table()[name]

    def columns(self) -> list[str]:
        """Those that are runs of bytes. PeerError when the rows are gone."""
        return list(self._columns().cells)

    def describe(self, source: int, most: int) -> Description:
        """What is told of the rows along with their statistics, which is at most ``most`` bytes."""
        split = self._columns()
        known = split.lengths if sum(pattern.nbytes for pattern in split.lengths) <= most else None
        return Description(source, shared_memory_domain(), split.row_bytes, split.pattern_of, known, self.loan)

    def lengths(self, rows: Ints) -> list[Ints]:
        """Elements of the rows, by pattern."""
        return [pattern[rows] for pattern in self._columns().lengths]

    def plain(self, rows: Ints) -> pa.Table:
        """The columns that are no runs of bytes."""
        return self._table().select(self._columns().plain).take(pa.array(rows))

    def plain_reply(self, rows: Ints, most: int) -> tuple[dict[str, Any], list[Frame], int]:
        """The plain columns as a header and frames, of the first rows: as many as fit into ``most`` bytes, at least
        one; and how many those are.
        """
        if not self._columns().plain:
            return {}, [], len(rows)
        count = min(len(rows), max(1, most // max(1, self.row_bytes)))
        plain = self.plain(rows[:count])
        while plain.nbytes > most and count > 1:
            count = max(1, count * most // (2 * plain.nbytes))
            plain = self.plain(rows[:count])
        self.let_go()
        return *to_frames(plain), count

    def nbytes_of(self, rows: Ints, columns: Sequence[str]) -> int:
        split = self._columns()
        elements = [int(pattern[rows].sum()) for pattern in split.lengths]
        return sum(elements[split.pattern_of[name]] * split.cells[name].width for name in columns)

    def gather(self, rows: Ints, columns: Sequence[str], arena: Arena) -> list[memoryview]:
        """A frame a column: the bytes of the rows, one row after the other."""
        split, frames = self._columns(), []
        runs = [self.runs(pattern, rows, starts_of(lengths[rows])) for pattern, lengths in enumerate(split.lengths)]
        for name in columns:
            cells, moved = split.cells[name], runs[split.pattern_of[name]]
            block = arena.allocate(moved.elements * cells.width)
            moved.move(cells.values, block.bytes, cells.width)
            frames.append(memoryview(block.buffer()))
        self.let_go()
        return frames

    def write(self, rows: Ints, columns: Sequence[str], target: Mapping[str, Any], attachments: Attachments) -> None:
        """Put the bytes of the rows where the asker said, in its memory. PeerError for places outside of it."""
        split = self._columns()
        try:
            segments = [attachments.attach(unpack_handle(handle)) for handle in target["handles"]]
            places = [unpack_ints(pattern, 2**48, 2**40)[: len(rows)] for pattern in target["patterns"]]
            runs: dict[tuple[int, int], Runs] = {}
            for name, (segment, base, where) in zip(columns, target["columns"], strict=True):
                cells, pattern = split.cells[name], split.pattern_of[name]
                if (pattern, where) not in runs:
                    runs[pattern, where] = self.runs(pattern, rows, places[where])
                if not isinstance(base, int) or base < 0:
                    raise IndexError(f"{base!r} is no place in a segment")
                runs[pattern, where].move(cells.values, segments[segment][base:], cells.width)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PeerError(f"refused to write rows: {error!r}") from error
        self.let_go()

    def runs(self, pattern: int, rows: Ints, places: Ints) -> Runs:
        """How rows go from columns of a pattern to ``places``, in elements."""
        split = self._columns()
        return Runs(split.starts[pattern][rows], places, split.lengths[pattern][rows])

    def column(self, name: str) -> tuple[Cells, int]:
        """A column that is runs of bytes, and its pattern."""
        split = self._columns()
        return split.cells[name], split.pattern_of[name]

    def let_go(self) -> None:
        """Pages of a spilled table that were read go back to the page cache, or they would count as this process's."""
        if self.spilled is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.spilled.madvise(mmap.MADV_DONTNEED)

    def _columns(self) -> _Split:
        table = self._table()
        if self._split is None:
            self._split = _Split.of(table)
        return self._split

    def _table(self) -> pa.Table:
        if self.table is None:
            raise PeerError("rows were asked for after every target had taken them")
        return self.table


def _cells_of(column: pa.ChunkedArray) -> Cells | None:
    if cell_width(column.type) is None:
        return None
    if column.num_chunks != 1:  # together they may be more than offsets of 32 bits span
        large = large_kind(column.type)
        column = pa.chunked_array([pa.concat_arrays([pa.array([], large), *column.cast(large).chunks])])
    return cells_of(column.chunk(0))


def spill(table: pa.Table, folder: str | None) -> tuple[pa.Table, mmap.mmap]:
    """The table, in an Arrow file that has no name and ends with this process, and the mapping it is read through."""
    with tempfile.TemporaryFile(dir=folder) as file:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return ipc.open_file(pa.py_buffer(mapped)).read_all(), mapped
