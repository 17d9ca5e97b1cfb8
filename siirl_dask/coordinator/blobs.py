"""Rows that share blobs: taken, joined by group and stored without a copy of the blob for each of them.

The rows of a group have the same images. In a table each row's value is a slice of the one buffer that has it; Arrow's
own ``take`` and ``filter`` would copy it for each row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.errors import DataError
from siirl_dask.schema import GROUP_ID, is_blob

Places = NDArray[np.intp]
"""[rows] index of a row in a table."""


def rows_at(table: pa.Table, places: Places) -> pa.Table:
    """Return the rows at ``places``, each as often as it is named. Blobs are not copied: each is a slice."""
    index = pa.array(places)
    columns = [_slices(column, places) if is_blob(column.type) else column.take(index) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def rows_where(table: pa.Table, flags: NDArray[np.bool_] | pa.ChunkedArray | pa.Array) -> pa.Table:
    """Return the rows with a true flag, as ``table.filter`` does. Blobs are not copied."""
    return rows_at(table, np.flatnonzero(np.asarray(flags, dtype=np.bool_)))


def with_values_of_groups(table: pa.Table, values: pa.Table, names: Sequence[str], source: str) -> pa.Table:
    """Return ``table`` with the columns ``names`` of ``values``, which has a row or more for each group: the first.

    DataError for a group that is not there; ``source`` names the table of ``values``.
    """
    groups, first = np.unique(_groups(values), return_index=True)
    wanted = _groups(table)
    index = np.searchsorted(groups, wanted)
    known = index < len(groups)
    known[known] = groups[index[known]] == wanted[known]
    if not known.all():
        raise missing_groups(np.unique(wanted[~known]), names, source)
    places = first[index]
    for name in names:
        column = values[name]
        spread = _slices(column, places) if is_blob(column.type) else column.take(pa.array(places))
        table = table.append_column(values.schema.field(name), spread)
    return table


def missing_groups(groups: NDArray[Any], names: Collection[str], source: str) -> DataError:
    """Return the error for groups that have rows here and none in the table that their blobs come from."""
    return DataError(
        f"{len(groups)} groups have rows here and no {[*names]} in the rows of {source!r} (first group_id "
        f"{groups[0]}): a node that numbers groups anew, or keeps some for later steps, declares groups='new' in its "
        "@columns"
    )


def one_of_each_group(table: pa.Table) -> pa.Table:
    """Return the first row of each group, in the order of the table."""
    groups = _groups(table)
    _, first = np.unique(groups, return_index=True)
    return table if len(first) == len(groups) else rows_at(table, np.sort(first))


def once_per_group(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the table to store: of each group the first row has the values of ``names``, and the others null."""
    _, first = np.unique(_groups(table), return_index=True)
    has = np.isin(np.arange(table.num_rows), first)
    for name in names:
        at, column = table.column_names.index(name), table[name]
        null = pa.nulls(1, column.type)
        parts = [chunk for row, own in enumerate(has) for chunk in (column.slice(row, 1).chunks if own else [null])]
        table = table.set_column(at, table.schema.field(name), pa.chunked_array(parts, column.type))
    return table


def filled_by_group(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return a table that ``once_per_group`` has made, in any order and in parts, with the values in all rows.

    Its groups are whole.
    """
    for name in names:
        column = table[name]
        there = np.flatnonzero(np.asarray(column.is_valid(), dtype=np.bool_))
        groups = _groups(table)
        valued = dict(zip(groups[there].tolist(), there.tolist(), strict=True))
        places = np.array([valued.get(group, row) for row, group in enumerate(groups.tolist())], dtype=np.intp)
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), _slices(column, places))
    return table


def _groups(table: pa.Table) -> NDArray[np.int64]:
    groups: NDArray[np.int64] = table[GROUP_ID].to_numpy()
    return groups


def _slices(column: pa.ChunkedArray, places: Places) -> pa.ChunkedArray:
    """Return the values at ``places`` as slices, one for each run of rows that follow each other."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    runs = np.split(places, ends) if len(places) else []
    parts = [chunk for run in runs for chunk in column.slice(int(run[0]), len(run)).chunks]
    return pa.chunked_array(parts, column.type)
