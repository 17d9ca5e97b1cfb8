"""Rows in memory: ranges of them, and rows that share blobs, which are taken, joined by group and
stored without a copy of the blob for each.

The rows of a group have the same images. In a table each row's value is a slice of the one buffer
that has it; Arrow's own ``take`` and ``filter`` would copy it for each row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.errors import DataError
from siirl_dask.schema import GROUP_ID, is_blob

Ints = NDArray[np.int64]
"""Whole numbers, such as ids, lengths or positions of rows."""
RowIndex = NDArray[np.intp]
"""[rows] index of each of some rows in a table."""


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` of ``parts`` consecutive ranges of ``count`` items, the longer ones
    first.

    10 over 4 is (0,3) (3,6) (6,8) (8,10).
    """
    base, extra = divmod(count, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(starts))


def rows_at(table: pa.Table, index: RowIndex) -> pa.Table:
    """Return the rows at ``index``, each as often as it is named. Blobs are not copied: each is
    a slice.
    """
    columns = [_take(column, index) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def rows_where(table: pa.Table, flags: NDArray[np.bool_] | pa.ChunkedArray | pa.Array) -> pa.Table:
    """Return the rows with a true flag, as ``table.filter`` does. Blobs are not copied."""
    return rows_at(table, np.flatnonzero(np.asarray(flags, dtype=np.bool_)))


def with_values_of_groups(
    table: pa.Table,
    values: pa.Table,
    names: Sequence[str],
    source: str,
) -> pa.Table:
    """Return ``table`` with the columns ``names`` of ``values``, which has a row or more for each
    group: the first.

    DataError for a group that is not there; ``source`` names the table of ``values``.
    """
    groups, first = np.unique(_groups(values), return_index=True)
    wanted = _groups(table)
    index = np.searchsorted(groups, wanted)
    known = index < len(groups)
    known[known] = groups[index[known]] == wanted[known]
    if not known.all():
        raise missing_groups(np.unique(wanted[~known]), names, source)
    rows = first[index]
    for name in names:
        table = table.append_column(values.schema.field(name), _take(values[name], rows))
    return table


def missing_groups(groups: NDArray[Any], names: Collection[str], source: str) -> DataError:
    """Return the error for groups that have rows here and none in the table that has their
    blobs.
    """
    return DataError(
        f"{len(groups)} groups have rows here and no {[*names]} in the rows of {source!r} (first "
        f"group_id {groups[0]}): a node that numbers groups anew, or keeps some for later steps, "
        "declares groups='new' in its @columns"
    )


def one_of_each_group(table: pa.Table) -> pa.Table:
    """Return the first row of each group, in the order of the table."""
    _, first = np.unique(_groups(table), return_index=True)
    if len(first) == table.num_rows:
        return table
    return rows_at(table, np.sort(first))


def once_per_group(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the table to store: of each group the first row has the values of ``names``, and
    the others null.
    """
    _, first = np.unique(_groups(table), return_index=True)
    is_first = np.isin(np.arange(table.num_rows), first)
    for name in names:
        column = table[name]
        null = pa.nulls(1, column.type)
        chunks: list[pa.Array] = []
        for row, has_value in enumerate(is_first):
            chunks.extend(column.slice(row, 1).chunks if has_value else [null])
        stored = pa.chunked_array(chunks, column.type)
        table = table.set_column(table.column_names.index(name), table.schema.field(name), stored)
    return table


def filled_by_group(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return a table that ``once_per_group`` has made, in any order and in parts, with the values
    in all rows.

    Its groups are whole.
    """
    groups = _groups(table)
    for name in names:
        column = table[name]
        valid = np.flatnonzero(np.asarray(column.is_valid(), dtype=np.bool_))
        row_of_group = dict(zip(groups[valid].tolist(), valid.tolist(), strict=True))
        rows = np.array(
            [row_of_group.get(group, row) for row, group in enumerate(groups.tolist())],
            dtype=np.intp,
        )
        index = table.column_names.index(name)
        table = table.set_column(index, table.schema.field(name), _slices(column, rows))
    return table


def _groups(table: pa.Table) -> NDArray[np.int64]:
    groups: NDArray[np.int64] = table[GROUP_ID].to_numpy()
    return groups


def _take(column: pa.ChunkedArray, index: RowIndex) -> pa.ChunkedArray:
    """Return the values at ``index``; blobs as slices, which are no copies."""
    if is_blob(column.type):
        return _slices(column, index)
    return column.take(pa.array(index))


def _slices(column: pa.ChunkedArray, index: RowIndex) -> pa.ChunkedArray:
    """Return the values at ``index`` as slices, one for each run of rows that follow each other."""
    chunks: list[pa.Array] = []
    if len(index):
        ends = np.flatnonzero(np.diff(index) != 1) + 1
        for run in np.split(index, ends):
            chunks.extend(column.slice(int(run[0]), len(run)).chunks)
    return pa.chunked_array(chunks, column.type)
