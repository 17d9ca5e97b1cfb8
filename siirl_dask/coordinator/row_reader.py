"""Reads a dataset's rows out of its row groups, and holds the next ones of each group within a budget.

A row group is decoded batch by batch. Rows that the following steps need are taken out of it in the same pass, as many
as fit into the budget, so that it is not decoded once for each row; all others are dropped at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np
import pyarrow as pa
from siirl_storage import FooterCache, RowGroup, Snapshot, StorageError, TooLarge

from siirl_dask.coordinator.data_order import RowPosition
from siirl_dask.coordinator.decoding import decode_column
from siirl_dask.coordinator.layout.balance import Ints
from siirl_dask.errors import DataError
from siirl_dask.schema import decoded, with_large_offsets

_UNPACKED = 4  # times its bytes in the file that a row is guessed to take


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """Rows of a row group, in ascending order."""

    table: pa.Table
    rows: Ints
    """Number of each row in the group."""
    nbytes: int

    @staticmethod
    def of(table: pa.Table, rows: Ints) -> _HeldRows:
        return _HeldRows(table, rows, int(table.nbytes) + rows.nbytes)

    def has(self, rows: Ints) -> bool:
        places = np.searchsorted(self.rows, rows)
        if (places == len(self.rows)).any():
            return False
        return bool((self.rows[places] == rows).all())

    def slice(self, row: int) -> pa.Table:
        """Return one row, which is held."""
        return self.table.slice(int(np.searchsorted(self.rows, row)), 1)


class RowReader:
    """Reads rows of one snapshot. Belongs to one thread.

    Args:
        name: The dataset, for errors.
        read_limit: Bytes that the rows of one call, or a row group, may take once decoded.
        keep: Bytes of rows that are held for later calls.
    """

    def __init__(self, name: str, snapshot: Snapshot, read_limit: int, keep: int) -> None:
        self._name = name
        self._snapshot = snapshot
        self._groups: Sequence[RowGroup] = snapshot.row_groups()
        self._limit = read_limit
        self._footers = FooterCache()
        self._keep = keep
        self._held: dict[tuple[int, tuple[str, ...]], _HeldRows] = {}  # least recently used first
        self._held_bytes = 0
        stored = sum(part.nbytes for part in snapshot.parts) // max(1, snapshot.num_rows)
        self._read_rows = 1  # both are a guess, until a row group has been read
        self._read_bytes = 1 + _UNPACKED * stored

    def read(self, rows: Sequence[RowPosition], following: Sequence[Ints], columns: tuple[str, ...]) -> pa.Table:
        """Return ``columns`` of the rows, in their order, with offsets of 64 bits.

        ``following`` are, for each row, those of the same row group that will be asked for next, in order.

        DataError for a file that cannot be read, or rows that take more than the limit.
        """
        by_group: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_group.setdefault(row.group, []).append(number)
        sources: list[_HeldRows | None] = [None] * len(rows)
        for group, numbers in by_group.items():
            budget = self._keep * len(numbers) // len(rows)
            wanted = np.array([rows[number].row for number in numbers], np.int64)
            held = self._hold(group, columns, wanted, [following[number] for number in numbers], budget)
            for number in numbers:
                sources[number] = held
        slices = []
        size = 0
        for row, source in zip(rows, sources, strict=True):
            assert source is not None
            slices.append(source.slice(row.row))
            size += int(slices[-1].nbytes)
            if size > self._limit:
                raise too_large(f"dataset {self._name!r}", f"a step of {len(rows)} rows", size, self._limit)
        return pa.concat_tables(slices).combine_chunks()

    def _hold(
        self, group: int, columns: tuple[str, ...], wanted: Ints, following: Sequence[Ints], budget: int
    ) -> _HeldRows:
        """Return a group's rows with those that are wanted, read now if they are not held already."""
        held = self._held.pop((group, columns), None)
        if held is not None:
            self._held_bytes -= held.nbytes
        if held is None or not held.has(wanted):
            held = self._read(group, columns, wanted, following, budget)
        self._held[group, columns] = held  # at the end: the dict's order is that of use
        self._held_bytes += held.nbytes
        self._shrink()
        return held

    def _read(
        self, group: int, columns: tuple[str, ...], wanted: Ints, following: Sequence[Ints], budget: int
    ) -> _HeldRows:
        fitting = budget * self._read_rows // self._read_bytes  # so many rows of the mean size
        chosen = _with_following(wanted, following, fitting)
        held = _HeldRows.of(self._decode(self._groups[group], columns, chosen), chosen)
        self._read_rows += len(chosen)
        self._read_bytes += held.nbytes
        if held.nbytes <= budget:
            return held
        fewer = _with_following(wanted, following, len(chosen) * budget // held.nbytes)  # longer ones than before
        return _HeldRows.of(held.table.take(pa.array(np.searchsorted(chosen, fewer))), fewer)

    def _decode(self, group: RowGroup, columns: tuple[str, ...], rows: Ints) -> pa.Table:
        try:
            table = self._snapshot.read_row_group(
                group, columns, rows=rows.tolist(), max_bytes=self._limit, footers=self._footers
            )
        except TooLarge as error:
            raise too_large(f"dataset {self._name!r}", error.where, error.nbytes, self._limit) from error
        except StorageError as error:
            raise DataError(f"dataset {self._name!r}: {error}") from error
        large = pa.schema([pa.field(field.name, with_large_offsets(decoded(field.type))) for field in table.schema])
        columns_decoded = [decode_column(table[field.name], field.type) for field in large]
        table = pa.Table.from_arrays(columns_decoded, schema=large)
        if table.nbytes > self._limit:  # a dictionary has each text once
            raise too_large(f"dataset {self._name!r}", f"a row group of {group.part!r}", table.nbytes, self._limit)
        return table.combine_chunks()

    def _shrink(self) -> None:
        """Drop what was not used for longest, until the rest fits the budget."""
        while self._held and self._held_bytes > self._keep:
            oldest = next(iter(self._held))
            self._held_bytes -= self._held.pop(oldest).nbytes


def too_large(dataset: str, what: str, nbytes: int, limit: int) -> DataError:
    """Return the error for ``what``, which takes more than may be read at once."""
    return DataError(
        f"{dataset}: {what} takes at least {nbytes} bytes once decoded, and a worker may read {limit} at once "
        "(data.read_limit; as data.memory_limit where it is not set): raise it, lower data.batch_size, or write the "
        "dataset with smaller row groups"
    )


def _with_following(wanted: Ints, following: Sequence[Ints], count: int) -> Ints:
    """Return the rows that are wanted, and up to ``count`` with those that are wanted soonest, in ascending order."""
    soonest: Iterator[int | None] = (row for rows in zip_longest(*following) for row in rows)
    ahead = islice((int(row) for row in soonest if row is not None), max(0, count - len(wanted)))
    return np.array(sorted({*wanted.tolist(), *ahead}), np.int64)
