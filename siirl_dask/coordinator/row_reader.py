"""Reads a dataset's rows out of its row groups, and holds the next ones of each group within a
budget.

A row group is decoded batch by batch. Rows that the following steps need are taken out of it in the
same pass, as many as fit into the budget, so that it is not decoded once for each row; all others
are dropped at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
from siirl_storage import FooterCache, RowGroup, Snapshot, StorageError, TooLarge

from siirl_dask.coordinator.data_order import RowPosition
from siirl_dask.errors import DataError
from siirl_dask.schema import loaded_type
from siirl_dask.tables import Ints, decode_column

_UNPACKED = 4  # a guess: bytes that a row takes, for each of its bytes in the file


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
        """Return whether all of ``rows`` are held."""
        places = np.searchsorted(self.rows, rows)
        if (places == len(self.rows)).any():
            return False
        return bool((self.rows[places] == rows).all())

    def slice(self, row: int) -> pa.Table:
        """Return one row, which is held."""
        return self.table.slice(int(np.searchsorted(self.rows, row)), 1)


@dataclass(frozen=True, slots=True)
class _Demand:
    """Rows of one row group that a step asks for, and those that later steps will."""

    group: int
    columns: tuple[str, ...]
    rows: Ints
    following: Sequence[Ints]
    """For each of the rows, those that will be asked for next, in order."""
    budget: int
    """Bytes of rows that may be held of the group."""

    def soonest(self, count: int) -> Ints:
        """Return the rows and those of the following ones that are wanted soonest, ``count`` in all
        or as many as are asked for now, in ascending order.
        """
        chosen = set(self.rows.tolist())
        ahead = islice(_soonest_first(self.following), max(0, count - len(self.rows)))
        chosen.update(ahead)
        return np.array(sorted(chosen), np.int64)


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
        # by the number of the row group and the columns, least recently used first
        self._held: dict[tuple[int, tuple[str, ...]], _HeldRows] = {}
        self._held_bytes = 0
        file_bytes = sum(part.nbytes for part in snapshot.parts)
        file_bytes_of_row = file_bytes // max(1, snapshot.num_rows)
        # the mean size of a row is bytes by rows: guessed, until a row group has been read
        self._read_rows = 1
        self._read_bytes = 1 + _UNPACKED * file_bytes_of_row

    def read(
        self,
        rows: Sequence[RowPosition],
        following: Sequence[Ints],
        columns: tuple[str, ...],
    ) -> pa.Table:
        """Return ``columns`` of the rows, in their order, with offsets of 64 bits.

        ``following`` are, for each row, those of the same row group that will be asked for next, in
        order.

        DataError for a file that cannot be read, or rows that take more than the limit.
        """
        by_group: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_group.setdefault(row.group, []).append(number)
        sources: list[_HeldRows | None] = [None] * len(rows)
        for group, numbers in by_group.items():
            demand = _Demand(
                group,
                columns,
                rows=np.array([rows[number].row for number in numbers], np.int64),
                following=[following[number] for number in numbers],
                budget=self._keep * len(numbers) // len(rows),
            )
            held = self._hold(demand)
            for number in numbers:
                sources[number] = held
        slices = []
        size = 0
        for row, source in zip(rows, sources, strict=True):
            assert source is not None
            row_slice = source.slice(row.row)
            slices.append(row_slice)
            size += int(row_slice.nbytes)
            if size > self._limit:
                raise too_large(
                    f"dataset {self._name!r}", f"a step of {len(rows)} rows", size, self._limit
                )
        return pa.concat_tables(slices).combine_chunks()

    def _hold(self, demand: _Demand) -> _HeldRows:
        """Return held rows of a group with all that are asked for, read now unless they are held
        already.
        """
        key = (demand.group, demand.columns)
        held = self._held.pop(key, None)
        if held is not None:
            self._held_bytes -= held.nbytes
        if held is None or not held.has(demand.rows):
            held = self._read(demand)
        self._held[key] = held  # at the end: the dict's order is that of use
        self._held_bytes += held.nbytes
        while self._held_bytes > self._keep and self._held:  # what was not used for longest goes
            oldest = next(iter(self._held))
            self._held_bytes -= self._held.pop(oldest).nbytes
        return held

    def _read(self, demand: _Demand) -> _HeldRows:
        """Read the rows that are asked for, and of the following ones as many as fit the budget."""
        count = demand.budget * self._read_rows // self._read_bytes  # rows of the mean size
        chosen = demand.soonest(count)
        table = self._decode(self._groups[demand.group], demand.columns, chosen)
        held = _HeldRows.of(table, chosen)
        self._read_rows += len(chosen)
        self._read_bytes += held.nbytes
        if held.nbytes <= demand.budget:
            return held
        # these rows are longer than the mean: hold only as many of them as fit
        fewer = demand.soonest(len(chosen) * demand.budget // held.nbytes)
        places = np.searchsorted(chosen, fewer)
        return _HeldRows.of(table.take(pa.array(places)), fewer)

    def _decode(self, group: RowGroup, columns: tuple[str, ...], rows: Ints) -> pa.Table:
        try:
            table = self._snapshot.read_row_group(
                group,
                columns,
                rows=rows.tolist(),
                max_bytes=self._limit,
                footers=self._footers,
            )
        except TooLarge as error:
            raise too_large(
                f"dataset {self._name!r}", error.where, error.nbytes, self._limit
            ) from error
        except StorageError as error:
            raise DataError(f"dataset {self._name!r}: {error}") from error
        fields = []
        arrays = []
        for field in table.schema:
            kind = loaded_type(field.type)
            fields.append(pa.field(field.name, kind))
            arrays.append(decode_column(table[field.name], kind))
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
        if table.nbytes > self._limit:  # decoded, a text takes its bytes in each row that has it
            raise too_large(
                f"dataset {self._name!r}",
                f"a row group of {group.part!r}",
                table.nbytes,
                self._limit,
            )
        return table.combine_chunks()


def too_large(dataset: str, what: str, nbytes: int, limit: int) -> DataError:
    """Return the error for ``what``, which takes more than may be read at once."""
    return DataError(
        f"{dataset}: {what} takes at least {nbytes} bytes once decoded, and a worker may read "
        f"{limit} at once (data.read_limit; as data.memory_limit where it is not set): raise it, "
        "lower data.batch_size, or write the dataset with smaller row groups"
    )


def _soonest_first(following: Sequence[Ints]) -> Iterator[int]:
    """Yield the first row of each sequence, then the second of each, and so on."""
    longest = max((len(rows) for rows in following), default=0)
    for index in range(longest):
        for rows in following:
            if index < len(rows):
                yield int(rows[index])
