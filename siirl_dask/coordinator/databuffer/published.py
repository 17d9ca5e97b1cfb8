"""A published table: what one source offers of an edge's rows, until every target has acked
them.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from siirl_dask.comms.wire import Frame, Pieces
from siirl_dask.coordinator.databuffer.arena import Arena, Attachments, unpack_handle
from siirl_dask.coordinator.databuffer.ragged import (
    CopyPlan,
    RaggedColumn,
    as_ragged,
    as_shared_ragged,
    element_width,
    starts_of,
)
from siirl_dask.coordinator.databuffer.row_lengths import RowLengths, SharedTable
from siirl_dask.coordinator.databuffer.shared_tables import share
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.layout.assignment import RowStatistics
from siirl_dask.coordinator.transport.messages import (
    Op,
    Request,
    TransitionKey,
    Transport,
    to_frames,
    unpack_ints,
)
from siirl_dask.errors import PeerError, SiirlError
from siirl_dask.schema import IDENTITY, with_large_offsets
from siirl_dask.tables import Ints

logger = logging.getLogger("siirl_dask.coordinator")
_ACK_DELAY = 0.1
"""Seconds: acks of one source share a message, and none is sent while other workers wait for
rows."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """A table's columns: the variable-length ones by offset group, and the other ones."""

    ragged: dict[str, RaggedColumn]
    group_of: dict[str, int]
    """Offset group of each variable-length column."""
    lengths: list[Ints]
    """Elements of each row, [rows] an offset group."""
    starts: list[Ints]
    """Elements before each row, [rows] an offset group. Columns of a group have both in common."""
    others: list[str]
    """Columns that are not variable-length, or have nulls, and are not known from the statistics
    already."""
    other_row_bytes: int
    """Bytes of a row in the other columns, about."""

    @staticmethod
    def of(table: pa.Table) -> _Columns:
        columns = {
            name: _in_one_piece(table[name]) for name in table.column_names if name not in IDENTITY
        }
        ragged = {name: column for name, column in columns.items() if column is not None}
        group_of: dict[str, int] = {}
        lengths: list[Ints] = []
        starts: list[Ints] = []
        # columns with the same lengths and starts are one group: these bytes are the key
        group_of_key: dict[tuple[bytes, bytes], int] = {}
        for name, column in ragged.items():
            key = (column.lengths.tobytes(), column.starts.tobytes())
            if key not in group_of_key:
                group_of_key[key] = len(group_of_key)
                lengths.append(column.lengths)
                starts.append(column.starts)
            group_of[name] = group_of_key[key]
        others = [name for name in columns if name not in ragged]
        other_bytes = sum(table[name].nbytes for name in others)
        other_row_bytes = -(-other_bytes // max(1, table.num_rows))  # rounded up
        return _Columns(
            ragged=ragged,
            group_of=group_of,
            lengths=lengths,
            starts=starts,
            others=others,
            other_row_bytes=other_row_bytes,
        )


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
    _split: _Columns | None = field(default=None, init=False)

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

    @property
    def other_row_bytes(self) -> int:
        """Bytes of a row in the other columns, about."""
        return self._columns().other_row_bytes

    def ack(self, rows: int) -> None:
        """Count ``rows`` as acked, and free the table when all are."""
        self.unacked -= rows
        if self.unacked <= 0:
            self.table = None
            self._split = None
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

    def ragged_columns(self) -> list[str]:
        """Return the names of the variable-length columns. PeerError when the rows are freed."""
        return list(self._columns().ragged)

    def row_lengths(self, source: int, max_bytes: int) -> RowLengths:
        """Return what travels with the statistics: the lengths of all rows, unless they exceed
        ``max_bytes``.
        """
        self._announced = True
        split = self._columns()
        fit = sum(lengths.nbytes for lengths in split.lengths) <= max_bytes
        return RowLengths(
            source=source,
            domain=shared_memory_domain(),
            other_row_bytes=split.other_row_bytes,
            offset_groups=split.group_of,
            group_lengths=split.lengths if fit else None,
            shared_table=self.shared_table,
        )

    def group_lengths(self, positions: Ints) -> list[Ints]:
        """Return elements of the rows at ``positions``, [rows] an offset group."""
        return [lengths[positions] for lengths in self._columns().lengths]

    def other_columns(self, positions: Ints) -> pa.Table:
        """Return the other columns of the rows at ``positions``."""
        return self._table().select(self._columns().others).take(pa.array(positions))

    def pack_other_columns(
        self, positions: Ints, max_bytes: int
    ) -> tuple[dict[str, Any], list[Frame], int]:
        """Pack the other columns of the first rows, as many as fit into ``max_bytes``, at least
        one.

        Returns a header, frames, and the number of rows packed.
        """
        if not self._columns().others:
            return {}, [], len(positions)
        count = min(len(positions), max(1, max_bytes // max(1, self.other_row_bytes)))
        others = self.other_columns(positions[:count])
        # rows differ; half of what fits on average converges fast
        while others.nbytes > max_bytes and count > 1:
            count = max(1, count * max_bytes // (2 * others.nbytes))
            others = self.other_columns(positions[:count])
        self.release_pages()
        header, frames = to_frames(others)
        return header, frames, count

    def ragged_bytes(self, positions: Ints, columns: Sequence[str]) -> int:
        """Return bytes of some variable-length columns of the rows at ``positions``."""
        split = self._columns()
        elements = [int(lengths[positions].sum()) for lengths in split.lengths]
        total = 0
        for name in columns:
            total += elements[split.group_of[name]] * split.ragged[name].width
        return total

    def row_frames(
        self,
        positions: Ints,
        columns: Sequence[str],
        arena: Arena,
    ) -> list[memoryview | Pieces]:
        """Return one frame a column, with the bytes of the rows one after the other.

        Long rows are sent from where they lie; short ones are copied, and those of a spilled table:
        the event loop sends, and would wait for pages of the file.
        """
        split = self._columns()
        plans = []
        for group, lengths in enumerate(split.lengths):
            targets = starts_of(lengths[positions])  # one row after the other
            plans.append(self.copy_plan(group, positions, targets))
        frames: list[memoryview | Pieces] = []
        for name in columns:
            column = split.ragged[name]
            plan = plans[split.group_of[name]]
            if self.spilled is None:
                pieces = plan.source_pieces(column.values, column.width)
                if pieces is not None:
                    frames.append(pieces)
                    continue
            block = arena.allocate(plan.elements * column.width)
            plan.copy(column.values, block.bytes, column.width)
            frames.append(memoryview(block.buffer()))
        self.release_pages()
        return frames

    def write_rows(
        self,
        positions: Ints,
        columns: Sequence[str],
        target: Mapping[str, Any],
        attachments: Attachments,
    ) -> None:
        """Write the rows into the asker's memory, where ``target`` says (see
        ``ReceiveBuffer.write_target``).

        PeerError for places outside of the asker's segments. The asker alone decides where rows go
        and lays out its result for all sources, so writing them twice, after a request that was
        repeated, gives the same bytes.
        """
        split = self._columns()
        try:
            handles = [unpack_handle(handle) for handle in target["handles"]]
            segments = [attachments.attach(handle) for handle in handles]
            packed_starts = target["starts"]
            starts = []
            for packed in packed_starts:
                starts.append(unpack_ints(packed, 2**48, 2**40)[: len(positions)])
            plans: dict[tuple[int, int], CopyPlan] = {}
            for name, (segment, base, target_group) in zip(columns, target["columns"], strict=True):
                column = split.ragged[name]
                group = split.group_of[name]
                plan = plans.get((group, target_group))
                if plan is None:
                    plan = self.copy_plan(group, positions, starts[target_group])
                    plans[group, target_group] = plan
                if not isinstance(base, int) or base < 0:
                    raise IndexError(f"{base!r} is no place in a segment")
                plan.copy(column.values, segments[segment][base:], column.width)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PeerError(f"refused to write rows: {error!r}") from error
        self.release_pages()

    def copy_plan(self, group: int, positions: Ints, targets: Ints) -> CopyPlan:
        """Plan to copy the rows at ``positions`` from columns of an offset group to ``targets``,
        in elements.
        """
        split = self._columns()
        return CopyPlan(split.starts[group][positions], targets, split.lengths[group][positions])

    def ragged_column(self, name: str) -> tuple[RaggedColumn, int]:
        """Return a variable-length column and its offset group."""
        split = self._columns()
        return split.ragged[name], split.group_of[name]

    def release_pages(self) -> None:
        """Drop the pages of a spilled table that were read: mapped, they would count as this
        process's memory.
        """
        if self.spilled is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.spilled.madvise(mmap.MADV_DONTNEED)

    def _columns(self) -> _Columns:
        table = self._table()
        if self._split is None:
            self._split = _Columns.of(table)
        return self._split

    def _table(self) -> pa.Table:
        if self.table is None:
            raise PeerError("rows were asked for after every target had acked them")
        return self.table


def _in_one_piece(column: pa.ChunkedArray) -> RaggedColumn | None:
    if element_width(column.type) is None:
        return None
    if column.num_chunks == 1:
        return as_ragged(column.chunk(0))
    if column.num_chunks > 1:
        shared = as_shared_ragged(column.chunks)
        if shared is not None:
            return shared
    # together the chunks may have more elements than offsets of 32 bits span
    large = with_large_offsets(column.type)
    return as_ragged(pa.concat_arrays([pa.array([], large), *column.cast(large).chunks]))


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


# Acks: shortly after a pull, sources learn which rows have arrived and may be freed.


class Acks:
    """Collects one worker's acks and sends them, one message a source. Belongs to the event loop.

    An ack is counted, not read: it is sent exactly once, and never repeated after a failure.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: dict[str, list[tuple[TransitionKey, int]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(self, source: str, key: TransitionKey, rows: int) -> None:
        """Ack soon that ``rows`` of a source's rows of a transition have arrived."""
        if self._closed:
            return
        self._pending.setdefault(source, []).append((key, rows))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ACK_DELAY, self.flush)

    def add_and_flush(self, source: str, key: TransitionKey, rows: int) -> None:
        """Ack now that ``rows`` of a source's rows of a transition have arrived."""
        self.add(source, key, rows)
        self.flush()

    def flush(self) -> None:
        """Send now what has been collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending = self._pending
        self._pending = {}
        for source, acks in pending.items():
            task = asyncio.create_task(self._send(source, acks))
            self._sending.add(task)  # the loop itself keeps no reference to a task
            task.add_done_callback(self._sending.discard)

    async def wait(self) -> None:
        """Send now what has been collected, and wait until every source has received it."""
        self.flush()
        await asyncio.gather(*self._sending)

    def close(self) -> None:
        """Send no more: the run is over or is being stopped, and sources free their tables with
        it.
        """
        self._closed = True
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()

    async def _send(self, source: str, acks: list[tuple[TransitionKey, int]]) -> None:
        body = {"acks": [[key.sequence, key.edge, rows] for key, rows in acks]}
        try:
            await self._transport.request(source, Request(Op.ACK, acks[0][0], body))
        except SiirlError as error:
            # No failure of this worker: it has its rows. The source frees the table when its
            # iteration is forgotten, a shared one when the run ends; if it waits for the ack, it
            # times out and ends the run.
            logger.warning("worker %r did not hear which rows have arrived: %s", source, error)
