"""Reads JSON Lines, JSON arrays and CSV with DuckDB, as a stream of batches.

Types are inferred from all values, not from the first ones: the files are read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage.exact_names import make_known, sql_list

from siirl_dask.errors import DataError

Batches = Callable[[], Iterator[pa.RecordBatch]]
_ROWS = 1024  # of a batch
_LARGEST_ROW = 2**24  # bytes of a row's text; DuckDB holds some of these
_MEMORY = "512MiB"
# Texts that look like dates stay texts: no date is written in this format.
_JSON = (
    "format='auto', sample_size=-1, map_inference_threshold=-1, field_appearance_threshold=0, maximum_depth=-1, "
    f"union_by_name=true, dateformat='\x01%Y', timestampformat='\x01%Y', maximum_object_size={_LARGEST_ROW}, "
    "hive_partitioning=false"
)
_CSV = (
    "header=true, sample_size=-1, auto_type_candidates=['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR'], "
    f"max_line_size={_LARGEST_ROW}, hive_partitioning=false"
)


def open_json(fs: AbstractFileSystem, files: Sequence[str]) -> tuple[pa.Schema, Batches]:
    """Open files of JSON objects, one a line or in an array. Keys that an object lacks are nulls.

    A column whose values are of several types becomes text. DataError for what is not JSON.
    """
    return _open(fs, files, "read_json", _JSON)


def open_csv(fs: AbstractFileSystem, files: Sequence[str], as_text: Collection[str]) -> tuple[pa.Schema, Batches]:
    """Open CSV files whose first line names the columns; those ``as_text`` are read as they are written."""
    schema, batches = _open(fs, files, "read_csv", _CSV)
    texts = [name for name in schema.names if name in as_text]
    if texts:
        named = ", ".join(f"{_quoted(name)}: 'VARCHAR'" for name in texts)
        schema, batches = _open(fs, files, "read_csv", f"{_CSV}, types={{{named}}}")
    return schema, batches


def _open(fs: AbstractFileSystem, files: Sequence[str], function: str, options: str) -> tuple[pa.Schema, Batches]:
    import duckdb  # here, so that reading a config does not load it

    connection = duckdb.connect(config={"memory_limit": _MEMORY, "threads": 2, "temp_directory": ""})
    connection.execute("SET enable_progress_bar = false")  # it would print its own
    make_known(connection, fs)
    call = f"{function}({sql_list(fs, files)}, {options}"
    try:
        described = connection.sql(f"DESCRIBE SELECT * FROM {call})").fetchall()
        types = {str(row[0]): str(row[1]) for row in described}
        if function == "read_json":  # what was inferred is given, or it would be inferred again
            named = ", ".join(f"{_quoted(name)}: {_quoted(kind)}" for name, kind in types.items())
            call += f", columns={{{named}}}" if types else ""
        query = f"SELECT {', '.join(_selected(name, kind) for name, kind in types.items())} FROM {call})"
        schema = connection.sql(f"{query} LIMIT 0").to_arrow_table().schema
    except duckdb.Error as error:
        raise _unreadable(files, error) from error

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from connection.sql(query).to_arrow_reader(_ROWS)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise _unreadable(files, error) from error
        finally:
            connection.close()

    return schema, batches


def _selected(name: str, kind: str) -> str:
    """Return a column's expression: values of several types as text, without JSON's quotes around texts, and numbers
    beyond 64 bits as text.
    """
    quoted = '"' + name.replace('"', '""') + '"'
    if kind in ("HUGEINT", "UHUGEINT"):  # would become decimals, which cannot move between workers
        return f"CAST({quoted} AS VARCHAR) AS {quoted}"
    return f"{quoted} ->> '$' AS {quoted}" if kind == "JSON" else quoted


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _unreadable(files: Sequence[str], error: Exception) -> DataError:
    shown = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    reason = str(error).partition("\n\nLINE ")[0].strip()
    return DataError(f"{shown} cannot be read: {reason}")
