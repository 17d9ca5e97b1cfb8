"""Reads JSON Lines, JSON arrays and CSV as a stream of batches in which every value is what the file has.

No type is guessed: those of JSON are decided by all values, for which the files are read twice, and CSV is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage.files import full_name

from siirl_dask.datasets.csv_rows import read_csv_columns
from siirl_dask.datasets.json_rows import Block, read_blocks
from siirl_dask.datasets.json_types import Shape, array_of
from siirl_dask.errors import DataError

Batches = Callable[[], Iterator[pa.RecordBatch]]
Made = TypeVar("Made")
_HELD = 2**28  # bytes of rows of JSON that are not read twice
_SEPARATORS = {",": "a comma", "\t": "a tab", ";": "';'", "|": "'|'"}


def open_json(fs: AbstractFileSystem, files: Sequence[str]) -> tuple[pa.Schema, Batches, list[str]]:
    """Open files of JSON objects, one a line or in an array; return also what is text although it was not written so.

    A key that an object lacks is null. DataError for what is not JSON, and for a key that an object has twice.
    """
    shape = Shape()
    held = _Held()
    for block in read_blocks(fs, files):
        _each_row(block, shape.look)
        held.add(block, shape)
    if not shape.names:
        raise DataError(f"{_shown(fs, files)} cannot be read: it has no object with a key, and so no columns")
    schema = pa.schema(shape.fields())

    def batches() -> Iterator[pa.RecordBatch]:
        if held.has_all_as(schema):
            yield from held.batches
            return
        for block in read_blocks(fs, files):
            yield _batch(block, schema)

    return schema, batches, list(shape.remarks())


class _Held:
    """Rows that need not be read again: those of files that are not large, whose first rows have the types of all."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self._size: int | None = 0  # None: these are not all

    def add(self, block: Block, shape: Shape) -> None:
        """Take rows that ``shape`` has seen, unless they or those before are too many."""
        schema = pa.schema(shape.fields())
        if self._size is None or not shape.names or not self.has_all_as(schema):
            self._size = None
            self.batches = []
            return
        self.batches.append(_batch(block, schema))
        self._size += self.batches[-1].nbytes
        if self._size > _HELD:
            self._size = None
            self.batches = []

    def has_all_as(self, schema: pa.Schema) -> bool:
        """Return whether all rows are here in the types of ``schema``."""
        return self._size is not None and all(batch.schema.equals(schema) for batch in self.batches[-1:])


def _batch(block: Block, schema: pa.Schema) -> pa.RecordBatch:
    kind = pa.struct(list(schema))
    arrays = _each_row(block, lambda rows: array_of(rows, kind))
    return pa.RecordBatch.from_struct_array(arrays)


def _each_row(block: Block, work: Callable[[Sequence[dict[str, object]]], Made]) -> Made:
    """Return what ``work`` makes of all rows of a block. DataError names the row for which it raises a ValueError."""
    try:
        return work(block.rows)
    except ValueError:
        for number, row in enumerate(block.rows, block.first):
            try:
                work([row])
            except ValueError as error:
                raise DataError(f"{block.file} cannot be read: row {number}: {error}") from error
        raise


def open_csv(fs: AbstractFileSystem, path: str, separator: str | None) -> tuple[pa.Schema, Batches]:
    """Open a CSV file whose first line names the columns; all are texts, and nulls where a line has nothing.

    ``separator`` None: a tab in files called .tsv, a comma in others. DataError for a file without names, and where
    another separator is likelier.
    """
    shown = full_name(fs, path)
    between = separator
    if between is None:
        between = "\t" if re.search(r"\.tsv(\.\w+)?$", path, re.IGNORECASE) else ","
    names = _names(fs, path, between)
    if len(names) == 1 and separator is None:
        other = next((mark for mark in _SEPARATORS if mark in names[0]), None)
        if other is not None:
            raise DataError(
                f"{shown}: its first line has no {_SEPARATORS[between].removeprefix('a ')}, and {_SEPARATORS[other]}: "
                f"say what is between columns, with --separator {other!r} or --separator {between!r}"
            )
    schema = pa.schema([pa.field(name or f"column{number}", pa.string()) for number, name in enumerate(names)])

    def batches() -> Iterator[pa.RecordBatch]:
        names_left = 1  # rows to skip: the names
        for columns in read_csv_columns(fs, path, between):
            arrays = [pa.array(column, pa.string()).slice(names_left) for column in columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            names_left = 0

    return schema, batches


def _names(fs: AbstractFileSystem, path: str, separator: str) -> list[str]:
    """Return the names in a CSV file's first line; an empty text for a column without one."""
    columns = next(read_csv_columns(fs, path, separator), [])
    names = ["" if column[0] is None else column[0] for column in columns if column]
    if not any(names):
        raise DataError(f"{full_name(fs, path)} cannot be read: its first line names no columns")
    return names


def _shown(fs: AbstractFileSystem, files: Sequence[str]) -> str:
    first = full_name(fs, files[0])
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more"
