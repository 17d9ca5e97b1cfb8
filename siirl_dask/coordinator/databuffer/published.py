"""A published table: what one source offers of an edge's rows, until every target has acked
them.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import ipc

from siirl_dask.coordinator.databuffer.arena import Arena
from siirl_dask.coordinator.databuffer.row_lengths import RowLengths, SharedTable
from siirl_dask.coordinator.databuffer.shared_tables import share
from siirl_dask.coordinator.databuffer.table_columns import TableColumns
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.layout.assignment import RowStatistics
from siirl_dask.errors import PeerError
from siirl_dask.tables import Ints


@dataclass(slots=True)
class Published:
    """One source's rows of a transition. They never change; they are freed when all targets have
    acked them.

    The event loop owns it and alone calls ``ack``. Threads that copy rows only read: its columns
    were split up before any peer could ask. A request that arrives after the last ack raises
    PeerError.
    """

    statistics: RowStatistics
    table: pa.Table | None
    """The rows; None when none move, and once all are acked."""
    unacked: int
    """Acks still to come, a row each: a row of an edge that replicates is acked several times."""
    spilled: mmap.mmap | None = None
    """The file that the table is mapped from, when memory was short."""
    shared_table: SharedTable | None = None
    """The place where targets on this host read the rows. They ack when they have dropped their
    last reference."""
    all_acked: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once every row is acked, or nobody will ack any more."""
    _announced: bool = field(default=False, init=False)
    """True once peers may know where the rows lie."""
    _columns: TableColumns | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.unacked == 0:
            self.all_acked.set()

    @property
    def rows(self) -> int:
        return len(self.statistics)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those that rows share once: 0 when the table is spilled or freed."""
        if self.table is None or self.spilled is not None:
            return 0
        return min(int(self.table.nbytes), int(self.table.get_total_buffer_size()))

    @property
    def is_shared(self) -> bool:
        """True while peers may still read the table where it lies, even after its iteration.

        Peers of which none has asked where the rows are will not: those who did not ask in the
        iteration never do.
        """
        if self.shared_table is None or self.table is None:
            return False
        return self._announced

    @property
    def bytes_in_chunks(self) -> int:
        """Bytes of columns in several chunks, which must be joined before rows of them can be
        copied.
        """
        return sum(int(column.nbytes) for column in self._table().columns if column.num_chunks != 1)

    def ack(self, rows: int) -> None:
        """Count ``rows`` as acked, and free the table when all are."""
        self.unacked -= rows
        if self.unacked <= 0:
            self.table = None
            self._columns = None
            self.spilled = None
            self.all_acked.set()

    def share(self, arena: Arena, min_row_bytes: int) -> None:
        """Move the rows into shared memory for targets on this host to read, where that pays
        (see ``shared_tables``).
        """
        shared = share(self._table(), arena, min_row_bytes)
        if shared is not None:
            self.table, self.shared_table = shared

    def shared_column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all rows, over the shared memory."""
        return self._table()[name]

    def columns(self) -> TableColumns:
        """Return the table's columns, which the first call splits up. PeerError when the rows are
        freed.
        """
        table = self._table()
        if self._columns is None:
            self._columns = TableColumns.of(table)
        return self._columns

    def row_lengths(self, source: int, max_bytes: int) -> RowLengths:
        """Return what travels with the statistics: the lengths of all rows, unless they exceed
        ``max_bytes``.
        """
        self._announced = True
        columns = self.columns()
        fit = sum(lengths.nbytes for lengths in columns.lengths) <= max_bytes
        return RowLengths(
            source=source,
            domain=shared_memory_domain(),
            other_row_bytes=columns.other_row_bytes,
            offset_groups=columns.group_of,
            group_lengths=columns.lengths if fit else None,
            shared_table=self.shared_table,
        )

    def other_columns(self, positions: Ints) -> pa.Table:
        """Return the other columns of the rows at ``positions``."""
        return self._table().select(self.columns().others).take(pa.array(positions))

    def release_pages(self) -> None:
        """Drop the pages of a spilled table that were read: mapped, they would count as this
        process's memory.
        """
        if self.spilled is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.spilled.madvise(mmap.MADV_DONTNEED)

    def _table(self) -> pa.Table:
        if self.table is None:
            raise PeerError("rows were asked for after every target had acked them")
        return self.table


def spill(table: pa.Table, folder: str | None) -> tuple[pa.Table, mmap.mmap]:
    """Write the table to an Arrow file and return the table over it, with the mapping that it is
    read through.

    The file has no name, so it ends with this process, however that ends.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return ipc.open_file(pa.py_buffer(mapped)).read_all(), mapped
