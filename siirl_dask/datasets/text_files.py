"""Reads JSON Lines, JSON arrays and CSV as a stream of batches in which every value is what the file has.

No type is guessed: those of JSON are decided by all values, for which the files are read twice, and CSV is text.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage.exact_names import make_known, sql_list
from siirl_storage.files import full_name

from siirl_dask.datasets.json_rows import LARGEST_ROW, Block, open_text, read_blocks
from siirl_dask.datasets.json_types import Shape, array_of
from siirl_dask.errors import DataError

Batches = Callable[[], Iterator[pa.RecordBatch]]
_ROWS = 1024  # of a batch
_MEMORY = "512MiB"
_SEPARATORS = {",": "a comma", "\t": "a tab", ";": "';'", "|": "'|'"}
_CSV = (
    "auto_detect=false, header=true, quote='\"', escape='\"', comment='', strict_mode=true, null_padding=false, "
    f"nullstr='', allow_quoted_nulls=false, parallel=false, max_line_size={LARGEST_ROW}, hive_partitioning=false"
)


def open_json(fs: AbstractFileSystem, files: Sequence[str]) -> tuple[pa.Schema, Batches, list[str]]:
    """Open files of JSON objects, one a line or in an array; return also what their values are text for.

    A key that an object lacks is null. DataError for what is not JSON, and for a key that an object has twice.
    """
    shape = Shape()
    for block in read_blocks(fs, files):
        _each_row(block, shape.look)
    if not shape.names:
        raise DataError(f"{_shown(fs, files)} cannot be read: it has no object with a key, and so no columns")
    kind = pa.struct(shape.fields())

    def batches() -> Iterator[pa.RecordBatch]:
        for block in read_blocks(fs, files):
            arrays: list[pa.Array] = []
            _each_row(block, lambda rows: arrays.append(array_of(rows, kind)))
            yield pa.RecordBatch.from_struct_array(pa.concat_arrays(arrays))

    return pa.schema(shape.fields()), batches, list(shape.remarks())


def _each_row(block: Block, work: Callable[[Sequence[dict[str, object]]], None]) -> None:
    """Give all rows of a block to ``work``. DataError names the row for which it raises a ValueError."""
    try:
        work(block.rows)
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
    names = _header(fs, path, between)
    if len(names) == 1 and separator is None:
        other = next((mark for mark in _SEPARATORS if mark in names[0]), None)
        if other is not None:
            raise DataError(
                f"{shown}: its first line has no {_SEPARATORS[between].removeprefix('a ')}, and {_SEPARATORS[other]}: "
                f"say what is between columns, with --separator {other!r} or --separator {between!r}"
            )
    schema = pa.schema([pa.field(name or f"column{number}", pa.string()) for number, name in enumerate(names)])

    def batches() -> Iterator[pa.RecordBatch]:
        import duckdb  # here, so that reading a config does not load it

        columns = ", ".join(f"c{number}: 'VARCHAR'" for number in range(len(names)))
        mark = "'" + between.replace("'", "''") + "'"
        with duckdb.connect(config={"memory_limit": _MEMORY, "threads": 2, "temp_directory": ""}) as connection:
            connection.execute("SET enable_progress_bar = false")  # it would print its own
            make_known(connection, fs)
            query = f"SELECT * FROM read_csv({sql_list(fs, [path])}, {_CSV}, delim={mark}, columns={{{columns}}})"
            try:
                for batch in connection.sql(query).to_arrow_reader(_ROWS):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                raise DataError(f"{shown} cannot be read: {_reason(str(error))}") from error

    return schema, batches


def _header(fs: AbstractFileSystem, path: str, separator: str) -> list[str]:
    """Return the names in a CSV file's first line."""
    shown = full_name(fs, path)
    with open_text(fs, path) as file:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()

        def lines() -> Iterator[str]:
            held = ""
            size = 0
            while data := file.read(2**16):
                size += len(data)
                if size > LARGEST_ROW:
                    raise DataError(f"{shown}: its first line is longer than {LARGEST_ROW} bytes")
                *whole, held = (held + decoder.decode(data)).splitlines(keepends=True)
                yield from whole
            yield held

        try:
            names = next(csv.reader(lines(), delimiter=separator, strict=True), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{shown} cannot be read: its first line, of names: {error}") from error
    if not any(names):
        raise DataError(f"{shown} cannot be read: its first line names no columns")
    return names


def _reason(text: str) -> str:
    """Return what DuckDB says about a line, without its advice."""
    found = re.match(r".*?CSV Error on Line: (\d+)\n", text)
    if found is None:
        return text.partition("\n\nLINE ")[0].strip()
    said = text[found.end() :].partition("\nPossible ")[0].strip()
    return f"line {found[1]}: {said.rpartition(chr(10))[2]}"


def _shown(fs: AbstractFileSystem, files: Sequence[str]) -> str:
    first = full_name(fs, files[0])
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more"
