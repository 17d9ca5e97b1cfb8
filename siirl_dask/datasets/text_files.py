"""Reads JSON Lines, JSON arrays and CSV as a stream of batches in which every value is what the
file has.

No type is guessed: those of JSON are decided by all values, and CSV is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage import full_name

from siirl_dask.datasets.csv_rows import read_csv_columns
from siirl_dask.datasets.json_rows import Block, read_blocks
from siirl_dask.datasets.json_types import JsonShape, array_of
from siirl_dask.errors import DataError

Batches = Callable[[], Iterator[pa.RecordBatch]]
Rows = Sequence[dict[str, object]]
Made = TypeVar("Made")
_SEPARATORS = {",": "a comma", "\t": "a tab", ";": "';'", "|": "'|'"}


class TypesChanged(DataError):
    """Rows have other types than those before them had: what was made of these has to be made
    again.
    """


class JsonFiles:
    """JSON objects, of whose values the types are decided by all rows.

    Most files have those that their first rows have, and are read once: ``batches`` starts with
    these, and raises TypesChanged if it comes to others, having looked at all rows. From then on,
    and after ``settle``, the types are those of all rows. DataError for what is not JSON, and for a
    key that an object has twice.
    """

    def __init__(self, fs: AbstractFileSystem, files: Sequence[str]) -> None:
        self._fs = fs
        self._files = files
        self._shape = JsonShape()
        self._unseen = self._blocks()
        self._first = next(self._unseen, None)
        if self._first is not None:
            self._look(self._first)
        if not self._shape.names:
            self.settle()

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self._shape.fields())

    @property
    def remarks(self) -> list[str]:
        """Remarks on what is text although it was not written so, in the rows that have been
        looked at.
        """
        return list(self._shape.remarks())

    def settle(self) -> None:
        """Look at all rows."""
        for block in self._unseen:
            self._look(block)
        self._first = None
        if not self._shape.names:
            raise DataError(
                f"{_shown(self._fs, self._files)} cannot be read: it has no object with a key, and "
                "so no columns"
            )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows; a key that an object lacks is null."""
        schema = self.schema
        if self._first is None:
            for block in self._blocks():
                yield _batch(block, schema)
            return
        yield _batch(self._first, schema)
        self._first = None
        for block in self._unseen:
            self._look(block)
            if self.schema != schema:
                self.settle()
                raise TypesChanged(
                    f"{block.file}: from row {block.first} on, types are not those of the first "
                    "rows"
                )
            yield _batch(block, schema)

    def _blocks(self) -> Iterator[Block]:
        return read_blocks(self._fs, self._files, self._exact_schema)

    def _exact_schema(self) -> pa.Schema | None:
        kind = self._shape.exact_type()
        if kind is None:
            return None
        return pa.schema(list(kind))

    def _look(self, block: Block) -> None:
        if not isinstance(block.rows, pa.RecordBatch):
            _each_row(block, block.rows, self._shape.look)


def _batch(block: Block, schema: pa.Schema) -> pa.RecordBatch:
    if isinstance(block.rows, pa.RecordBatch):
        return block.rows
    kind = pa.struct(list(schema))
    arrays = _each_row(block, block.rows, lambda rows: array_of(rows, kind))
    return pa.RecordBatch.from_struct_array(arrays)


def _each_row(block: Block, rows: Rows, work: Callable[[Rows], Made]) -> Made:
    """Return what ``work`` makes of all rows of a block. DataError names the row for which it
    raises a ValueError.
    """
    try:
        return work(rows)
    except ValueError:
        for number, row in enumerate(rows, block.first):
            try:
                work([row])
            except ValueError as error:
                raise DataError(f"{block.file} cannot be read: row {number}: {error}") from error
        raise


def open_csv(fs: AbstractFileSystem, path: str, separator: str | None) -> tuple[pa.Schema, Batches]:
    """Open a CSV file whose first line names the columns; all are texts, and nulls where a line has
    nothing.

    ``separator`` None: a tab in files called .tsv, a comma in others. DataError for a file without
    names, and where another separator is likelier.
    """
    shown = full_name(fs, path)
    between = separator
    if between is None:
        between = ","
        if re.search(r"\.tsv(\.\w+)?$", path, re.IGNORECASE):
            between = "\t"
    names = _names(fs, path, between)
    if len(names) == 1 and separator is None:
        other = next((mark for mark in _SEPARATORS if mark in names[0]), None)
        if other is not None:
            raise DataError(
                f"{shown}: its first line has no {_SEPARATORS[between].removeprefix('a ')}, and "
                f"{_SEPARATORS[other]}: say what is between columns, with --separator {other!r} or "
                f"--separator {between!r}"
            )
    schema = pa.schema(
        [pa.field(name or f"column{number}", pa.string()) for number, name in enumerate(names)]
    )

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
    if len(files) == 1:
        return first
    return f"{first} and {len(files) - 1} more"
