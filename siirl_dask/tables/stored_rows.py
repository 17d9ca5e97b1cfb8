"""Reads a worker's share of rows that the run stored at a step, whichever workers wrote them."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
from siirl_storage import (
    Part,
    PartsRecord,
    StorageError,
    join,
    open_fs,
    read_footer,
    read_record,
    read_rows,
)

from siirl_dask.errors import DataError
from siirl_dask.schema import GROUP_ID, Schema
from siirl_dask.tables.rows import rows_where, split

_STEP = re.compile(r"step=(\d{6,})", re.ASCII)


def step_name(step: int) -> str:
    """Return the name of the folder that holds the rows of ``step`` in a table of a run."""
    return f"step={step:06d}"


def step_of(folder: str) -> int | None:
    """Return the step of a folder by its name, as ``step_name`` makes it; None for any other
    folder.
    """
    matched = _STEP.fullmatch(folder)
    if matched:
        return int(matched[1])
    return None


def step_folder(run_url: str, table: str, step: int) -> str:
    """Return the folder of the rows that the run at ``run_url`` saves in ``table`` at ``step``."""
    return join(run_url, table, step_name(step))


def read_stored_rows(
    folder: str,
    schema: Schema,
    index: int,
    count: int,
    max_bytes: int,
    *,
    whole: bool = False,
) -> pa.Table:
    """Return the share of worker ``index`` of ``count`` of the rows committed in ``folder``, with
    ``schema``'s columns.

    Where as many workers wrote as read, each gets the part of its number; otherwise the rows are
    split evenly in the order of the parts. No worker reads more than the row groups with its rows.
    ``max_bytes`` bounds them, decoded.
    ``whole``: groups are not split, for which each worker then reads all parts.

    DataError when the rows are not there, are damaged, or have other columns.
    """
    try:
        record = read_record(folder)
        if record is None:
            raise DataError(
                f"{folder!r} holds no rows that are whole: a part that was committed is gone"
            )
        reads_all = False
        if whole:  # groups may lie in several parts
            reads_all = count != len(record.parts)
        share = _share(record, 0, 1) if reads_all else _share(record, index, count)
        tables = [
            _read(folder, part, group, rows=rows, schema=schema, max_bytes=max_bytes)
            for part, group, rows in share
        ]
    except StorageError as error:
        raise DataError(f"the rows stored in {folder!r} cannot be read: {error}") from error
    rows = pa.concat_tables([schema.empty_table(), *tables])
    if reads_all:
        return _own_groups(rows, index, count)
    return rows


def read_kept_rows(folder: str, index: int, count: int, max_bytes: int) -> pa.Table | None:
    """Return the share of worker ``index`` of ``count`` of what nodes kept, committed in
    ``folder``; None for nothing.

    Groups stay whole. Where as many workers wrote as read, each gets the part of its number;
    otherwise each reads all parts. ``max_bytes`` bounds a row group, decoded. DataError when the
    rows are not there or are damaged.
    """
    try:
        record = read_record(folder)
        if record is None:
            raise DataError(
                f"{folder!r} holds no rows that are whole: a part that was committed is gone"
            )
        reads_all = count != len(record.parts)
        parts = list(record.parts) if reads_all else [record.parts[index]]
        tables = [_read_part(folder, part, max_bytes) for part in parts if part.rows]
    except StorageError as error:
        raise DataError(f"the rows stored in {folder!r} cannot be read: {error}") from error
    if not tables:
        return None
    rows = pa.concat_tables(tables)
    if reads_all:
        return _own_groups(rows, index, count)
    return rows


def _own_groups(rows: pa.Table, index: int, count: int) -> pa.Table:
    groups = rows[GROUP_ID].to_numpy()
    return rows_where(rows, np.isin(groups, np.unique(groups)[index::count]))


def _read_part(folder: str, part: Part, max_bytes: int) -> pa.Table:
    fs, path = open_fs(join(folder, part.path))
    names = read_footer(fs, path).schema.names
    groups = range(len(part.groups))
    return pa.concat_tables(
        [read_rows(fs, path, at, names, part.groups, max_bytes=max_bytes) for at in groups]
    )


def _share(record: PartsRecord, index: int, count: int) -> list[tuple[Part, int, range]]:
    """Return part, row group and rows in it, of each piece of a worker's share."""
    groups = [(part, group) for part in record.parts for group in range(len(part.groups))]
    if count == len(record.parts):
        own = record.parts[index]
        return [(own, group, range(rows)) for group, rows in enumerate(own.groups) if rows]
    start, stop = split(sum(part.rows for part in record.parts), count)[index]
    pieces = []
    first = 0
    for part, group in groups:
        rows = part.groups[group]
        wanted = range(max(start - first, 0), min(stop - first, rows))
        if wanted:
            pieces.append((part, group, wanted))
        first += rows
    return pieces


def _read(
    folder: str,
    part: Part,
    group: int,
    *,
    rows: range,
    schema: Schema,
    max_bytes: int,
) -> pa.Table:
    fs, path = open_fs(join(folder, part.path))
    chosen = None if len(rows) == part.groups[group] else rows
    table = read_rows(fs, path, group, schema.names, part.groups, rows=chosen, max_bytes=max_bytes)
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise DataError(
            f"{folder!r} holds rows without {missing}: another DAG or version of siirl_dask wrote "
            "them"
        )
    if table.schema.equals(schema):
        return table
    return table.cast(schema)
