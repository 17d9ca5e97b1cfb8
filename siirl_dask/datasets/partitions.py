"""Writes a partition of a Dask collection as a part of a table, on the worker that holds it.

Knows nothing of Dask: a partition is a pandas dataframe, a list of rows as a bag has them, or an
Arrow table. See driver/collection.py for who calls it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import Part, StorageError, join, open_fs, read_rows, stage

from siirl_dask.datasets.casting import cast
from siirl_dask.datasets.mapping import common_type, storable
from siirl_dask.errors import DataError
from siirl_dask.schema import decoded, inner_nulls_as_text, is_index_column, path_steps
from siirl_dask.wording import exception_text

_ROW_GROUP_BYTES = 2**24  # before they are encoded, as data import writes
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content)\1\s*:""")


@dataclass(frozen=True, slots=True)
class StagedPartition:
    """A partition as the driver learns of it: without a row."""

    part: Part | None
    """The part that was written; None for a partition without rows."""
    schema: bytes
    """Serialized schema of its columns."""
    problem: str = ""
    """A sentence on why its rows cannot be a dataset; nothing was written then."""


def stage_partition(partition: object, url: str, prompt: str) -> StagedPartition:
    """Write a partition as a part of the table at ``url``, which no reader sees before it is
    committed. ``prompt`` is the column of prompts; a dot leads into a struct.
    """
    try:
        table = partition_table(partition)
    except DataError as error:
        return StagedPartition(None, b"", f"a partition is no table: {error}")
    except Exception as error:  # Arrow, pandas and objects of the user's own raise what they like
        problem = f"a partition is no table: to make one {exception_text(error)}"
        return StagedPartition(None, b"", problem)
    schema = table.schema.serialize().to_pybytes()
    problem = _chat_as_text(table, prompt)
    if problem or not table.num_rows:
        return StagedPartition(None, schema, problem)
    try:
        part = stage(url, table, bytes_per_group=_ROW_GROUP_BYTES)
    except StorageError as error:
        return StagedPartition(None, schema, str(error))
    return StagedPartition(part, schema)


def partition_table(partition: object) -> pa.Table:
    """Return a partition as a table of the types that Parquet has, without dictionaries (pandas'
    categories) and without a dataframe's index. The same rows give the same table.

    DataError for something that is none, and for rows that are no mappings.
    """
    table = _arrow(partition)
    counts = Counter(table.column_names)
    for name, count in counts.items():
        if count > 1:
            raise DataError(f"{count} of its columns are called {name!r}")
    names = [name for name in table.column_names if not is_index_column(name)]
    columns = []
    fields = []
    for name in names:
        kind = decoded(table.schema.field(name).type, storable)
        fields.append(pa.field(name, kind))
        columns.append(cast(table[name], kind).combine_chunks())
    return pa.table(columns, schema=pa.schema(fields))


def _arrow(partition: object) -> pa.Table:
    if isinstance(partition, pa.Table):
        return partition
    if isinstance(partition, pa.RecordBatch):
        return pa.Table.from_batches([partition])
    is_of_pandas = type(partition).__module__.partition(".")[0] == "pandas"
    if is_of_pandas and hasattr(partition, "columns"):
        return pa.Table.from_pandas(partition, preserve_index=False)
    if is_of_pandas or isinstance(partition, str | bytes | Mapping):
        raise _no_table(partition)
    if isinstance(partition, Iterable):
        return _of_rows(list(partition))
    raise _no_table(partition)


def _no_table(partition: object) -> DataError:
    return DataError(
        f"it is a {type(partition).__name__}; expected a dataframe, an Arrow table or a list of "
        "dicts"
    )


def _of_rows(rows: list[Any]) -> pa.Table:
    """Return rows, as a bag has them, as a table; a key that a row lacks is null there."""
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(f"a row of it is {row!r:.80}; expected dicts of columns")
        other = next((name for name in row if not isinstance(name, str)), None)
        if other is not None:
            raise DataError(f"a row of it has the key {other!r}; expected names of columns as keys")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(f"column {name!r}: {error}") from error
    return pa.table(columns)


def _chat_as_text(table: pa.Table, prompt: str) -> str:
    """Return a sentence where all prompts are chat messages that became the text of a list.

    A dataframe of Dask makes texts of all objects unless it is asked not to: a model would learn
    from ``"[{'role': 'user', ..."``.
    """
    column, *fields = path_steps(prompt, table.column_names)
    if column not in table.column_names:
        return ""  # which the check of the dataset's columns reports
    prompts = table[column]
    if fields:
        try:
            prompts = pc.struct_field(prompts, fields)
        except (pa.ArrowException, TypeError):
            return ""
    example = chat_as_text(prompts)
    if example is None:
        return ""
    return (
        f"the prompts (data.prompt={prompt}) are texts such as {example!r:.60}, lists of chat "
        'messages that became text, as Dask makes it of objects: set dask.config.set({"dataframe.'
        'convert-string": False}) before the dataframe is made, or use a bag or Arrow tables, which '
        "keep them"
    )


def chat_as_text(prompts: pa.ChunkedArray) -> str | None:
    """Return the first prompt where each is a text that begins as Python or JSON writes a list of
    chat messages; None where one does not, and where there are none.
    """
    kind = prompts.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return None
    texts = prompts.drop_null()
    if not len(texts) or not _CHAT_AS_TEXT.match(texts[0].as_py()):
        return None
    if not all(_CHAT_AS_TEXT.match(text) for text in texts.to_pylist()):
        return None
    first: str = texts[0].as_py()
    return first


def common_schema(partitions: Iterable[StagedPartition]) -> pa.Schema:
    """Return the schema that holds the rows of all partitions: see ``common_type``. Keys and items
    without a value in any of them are texts.

    The order of the partitions decides that of a struct's keys, whoever has written first.

    DataError for a column that only some have, or of which no type holds all values.
    """
    fields: dict[str, pa.Field] = {}
    for number, partition in enumerate(partitions):
        if partition.part is None:
            continue
        own = schema_of(partition)
        if fields and (different := sorted({*fields} ^ {*own.names})):
            raise DataError(
                f"data: column {different[0]!r} is in some partitions only: give it to all rows, "
                "with null where there is no value"
            )
        for field in own:
            known = fields.setdefault(field.name, field)
            kind = common_type(known.type, field.type)
            if kind is None:
                raise DataError(
                    f"data: column {field.name!r} is {known.type} in the partitions before, and "
                    f"{field.type} in partition {number}: give all rows values of one type, or "
                    "make Arrow tables with a schema of the partitions"
                )
            fields[field.name] = known.with_type(kind)
    return pa.schema(
        [field.with_type(inner_nulls_as_text(field.type)) for field in fields.values()]
    )


def schema_of(partition: StagedPartition) -> pa.Schema:
    """Return the columns of a partition that could be made a table."""
    return pa.ipc.read_schema(pa.py_buffer(partition.schema))


def is_written_as(partition: StagedPartition, schema: pa.Schema) -> bool:
    """Return whether a table with ``schema`` can have the part of a partition as it is: its types
    are those, but for columns without a value.
    """
    if partition.part is None:
        return True
    for field in schema_of(partition):
        is_null = pa.types.is_null(field.type)
        if not is_null and field.type != schema.field(field.name).type:
            return False
    return True


def stage_again(staged: StagedPartition, url: str, schema: pa.Schema) -> StagedPartition:
    """Write the part of a partition once more, as another part of the table at ``url``, in the
    types of ``schema``, which ``common_schema`` returned.
    """
    assert staged.part is not None
    fs, path = open_fs(join(url, staged.part.path))
    sizes = staged.part.groups
    names = schema.names
    groups = [read_rows(fs, path, number, names, sizes) for number in range(len(sizes))]
    table = pa.concat_tables(groups)
    columns = []
    for field in schema:
        try:
            columns.append(cast(table[field.name], field.type).combine_chunks())
        except (pa.ArrowException, ValueError) as error:  # a number beyond the range of the others
            problem = f"column {field.name!r} cannot be {field.type}: {error}"
            return replace(staged, part=None, problem=problem)
    table = pa.table(columns, schema=schema)
    part = stage(url, table, bytes_per_group=_ROW_GROUP_BYTES)
    return StagedPartition(part, schema.serialize().to_pybytes())
