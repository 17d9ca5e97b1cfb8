"""Imports datasets into a table of siirl_storage: rows stream from files of any kind, and are
committed at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from siirl_storage import Snapshot, TableNotFound, open_fs, open_table

from siirl_dask.config import check_location
from siirl_dask.datasets.column_paths import extract, steps_of
from siirl_dask.datasets.destination import destination
from siirl_dask.datasets.inputs import InputRows, open_inputs, readable, total_rows
from siirl_dask.datasets.lengths import LengthDistribution, Measure, measure_column
from siirl_dask.datasets.mapping import ColumnMapping, unify
from siirl_dask.datasets.table_writer import TableWriter
from siirl_dask.datasets.text_files import TypesChanged
from siirl_dask.datasets.token_lengths import TokenLengths, extended
from siirl_dask.errors import ConfigError, DataError, UserError, did_you_mean
from siirl_dask.schema import decoded
from siirl_dask.wording import redacted

ROW_GROUP_BYTES = 2**24
"""Default size of a row group before it is encoded: what a worker decodes to read some of its
rows."""
Progress = Callable[[int, int, int | None], None]
"""Called as ``(rows, bytes, rows in all or None)`` while rows come in."""


@dataclass(kw_only=True, slots=True)
class PromptLengths:
    """Counts the prompts' lengths while they are imported."""

    prompt: str
    """Column of the prompts in the table; a dot leads into a struct."""
    measure: Measure
    column: str | None = None
    """Column that is written with each prompt's length; None writes none."""
    tokenizer: str | None = None
    """Identity of the tokenizer whose tokens ``measure`` counts; None where it counts something
    else."""
    lengths: LengthDistribution = field(default_factory=LengthDistribution)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """An import that a user asks for: the sources, the mapping of their columns, and the
    destination.
    """

    sources: Sequence[str]
    """Files, globs, folders, tables or saved datasets, on any fsspec URL, in the order of their
    rows."""
    to: str
    """URL of the table."""
    mapping: ColumnMapping = field(default_factory=ColumnMapping)
    transform: Callable[[pa.Table], pa.Table] | None = None
    """Function that rows go through first, some at a time; it gives tables of one schema. It is
    called with a table without rows as well.
    """
    source_column: str | None = None
    """Column that is written with the source of each row, as it is in ``sources``."""
    prompts: PromptLengths | None = None
    row_group_bytes: int = ROW_GROUP_BYTES
    append: bool = False
    """Append to the table that is there, if there is one."""
    remark: Callable[[str], None] = lambda text: None
    """Called with what a user should know of how values were read, such as numbers of which text
    was made."""
    separator: str | None = None
    """Mark between the columns of CSV files; None: a comma, or a tab where they are called .tsv."""


def import_data(
    request: ImportRequest, progress: Progress = lambda rows, nbytes, total: None
) -> Snapshot:
    """Write all rows of the sources as one table, and return it. There is no table before all rows
    are in it.

    A few parts of 64 MiB are in memory. DataError for a source that cannot be used, and where there
    is a table already; what has been written until then is removed.
    """
    there = _destination_table(request)
    _token_lengths(request, there, 0)  # refuses lengths of two tokenizers in one column
    inputs = [one for url in request.sources for one in open_inputs(url, request.separator)]
    try:
        mapped, schema = _mapped(request, inputs)
    except UserError:  # perhaps of a column that is not in the first rows
        inputs = [one.settled() for one in inputs]
        mapped, schema = _mapped(request, inputs)
    try:
        return _write(request, mapped, schema, there, progress)
    except TypesChanged:
        if request.prompts is not None:
            request.prompts.lengths = LengthDistribution()
        mapped, schema = _mapped(request, [one.settled() for one in inputs])
        return _write(request, mapped, schema, there, progress)


def _mapped(request: ImportRequest, inputs: Sequence[InputRows]) -> tuple[list[_Mapped], pa.Schema]:
    """Return the inputs as columns of the table, and its schema."""
    mapped = [_Mapped(request, one) for one in inputs]
    schema = _with_own_columns(request, unify([(one.input.name, one.schema) for one in mapped]))
    if request.prompts is not None:
        check_prompts(schema, request.prompts.prompt, request.to)
    return mapped, schema


def _write(
    request: ImportRequest,
    mapped: Sequence[_Mapped],
    schema: pa.Schema,
    there: Snapshot | None,
    progress: Progress,
) -> Snapshot:
    """Write all rows; TypesChanged, and nothing is written, where some have other types than
    their input's first.
    """
    inputs = [one.input for one in mapped]
    total = total_rows(inputs)
    rows = nbytes = 0
    with TableWriter(request.to, schema, request.row_group_bytes) as writer:
        progress(0, 0, total)
        for one in mapped:
            for table in one.tables(schema):
                with destination(request.to):
                    writer.write(table)
                rows = rows + table.num_rows
                nbytes = nbytes + int(table.nbytes)
                progress(rows, nbytes, total)
        if not rows:
            raise DataError(f"{', '.join(request.sources)}: there are no rows")
        for source in inputs:
            for text in source.remarks():
                request.remark(f"{source.name}: {text}")
        with destination(request.to):
            properties = {"imported": json.dumps({"sources": redacted(list(request.sources))})}
            return writer.commit(
                properties | _token_lengths(request, there, rows), append=request.append
            )


class _Mapped:
    """An input, as columns of the table."""

    def __init__(self, request: ImportRequest, source: InputRows) -> None:
        self._request = request
        self.input = source
        given = source.schema.remove_metadata()
        if request.transform is not None:
            given = self._transformed(given.empty_table()).schema
        self.schema = request.mapping.schema(given, source.name)

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield all rows in the table's schema, with the columns that the import adds."""
        request = self._request
        name = self.input.name
        own = {request.source_column, request.prompts and request.prompts.column}
        columns = pa.schema([one for one in schema if one.name not in own])
        before = 0
        for batch in self._batches():
            table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
            if request.transform is not None:
                table = self._transformed(table)
            table = request.mapping.apply(table, columns, name, before)
            before += table.num_rows
            if request.prompts is not None:
                prompts = request.prompts
                lengths = measure_column(extract(table, prompts.prompt), prompts.measure)
                prompts.lengths.add(lengths)
                if prompts.column is not None:
                    table = table.append_column(prompts.column, pa.array(lengths, pa.int64()))
            if request.source_column is not None:
                source = pa.repeat(pa.scalar(self.input.source), table.num_rows)
                table = table.append_column(request.source_column, source)
            yield table.select(schema.names)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with readable(self.input.name):
            yield from self.input.batches()

    def _transformed(self, table: pa.Table) -> pa.Table:
        assert self._request.transform is not None
        try:
            return self._request.transform(table)
        except KeyError as error:
            known = table.column_names
            raise DataError(
                f"{self.input.name!r} lacks a column that its recipe expects: {error.args[0]} "
                f"(there is: {known})"
            ) from error


def check_prompts(schema: pa.Schema, prompt: str, name: str) -> None:
    """Raise DataError unless the column of prompts holds texts or lists of chat messages."""
    if prompt not in schema.names and steps_of(prompt)[0] not in schema.names:
        known = schema.names
        raise DataError(
            f"{name!r} has no column {prompt!r} of prompts (there is: "
            f"{', '.join(known)}){did_you_mean(prompt, known)}; --prompt names it"
        )
    kind = extract(schema.empty_table(), prompt).type
    if not is_prompt(kind):
        raise DataError(
            f"column {prompt!r} holds {kind}: expected texts, or lists of chat messages (role, "
            "content)"
        )


def is_prompt(kind: pa.DataType) -> bool:
    """Return whether values of a type are texts, or lists of chat messages, in whatever layout."""
    kind = decoded(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_message(kind.value_type)
    if pa.types.is_large_string(kind):
        return True
    return bool(pa.types.is_string(kind))


def _is_message(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind):
        return False
    return {"role", "content"} <= {one.name for one in kind}


def _with_own_columns(request: ImportRequest, schema: pa.Schema) -> pa.Schema:
    kinds = {request.source_column: pa.string()}
    if request.prompts is not None:
        kinds[request.prompts.column] = pa.int64()
    for name, kind in kinds.items():
        if name in schema.names:
            raise ConfigError(
                f"column {name!r} is there already: choose another name for the one that is added"
            )
        if name is not None:
            schema = schema.append(pa.field(name, kind))
    return schema


def _destination_table(request: ImportRequest) -> Snapshot | None:
    """Return the table that rows are appended to, if there is one, before anything is read.

    DataError for a table that is there and is not appended to, or a URL that cannot be opened.
    """
    if not request.to.strip():
        raise DataError(
            f"DEST={request.to!r}: expected the place of a table, which is not there yet"
        )
    check_location("DEST", request.to)
    with destination(request.to):
        try:
            there = open_table(request.to)
        except TableNotFound as error:
            fs, path = open_fs(request.to)
            if fs.isfile(path):
                raise DataError(
                    f"DEST={request.to!r} is a file, and a table is a folder: choose another name"
                ) from error
            return None
        if not request.append or there.version is None:
            what = "a table is"
            if there.version is None:
                what = "files of a dataset are"
            raise DataError(
                f"{what} at {request.to!r} already: choose another DEST, remove it, or --append to "
                "a table"
            )
        return there


def _token_lengths(request: ImportRequest, there: Snapshot | None, rows: int) -> dict[str, str]:
    """Return the property that tells which column has the lengths of the prompts, with ``rows``
    new rows.
    """
    prompts = request.prompts
    if prompts is None or prompts.column is None or prompts.tokenizer is None:
        return {}
    found = TokenLengths(prompts.column, prompts.prompt, prompts.tokenizer, rows)
    known = extended(found, there)
    if known is None:
        return {}
    return known.as_properties()
