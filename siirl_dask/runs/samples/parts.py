"""The committed parts of a run's tables, one by one, for readers that take them in parallel: such as
the partitions of a Dask collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral

import pyarrow as pa
from siirl_storage import StorageError, join, open_fs, read_footer, read_rows

from siirl_dask.errors import ConfigError, DataError, SiirlError, counted
from siirl_dask.runs.absent import hint_if_absent
from siirl_dask.runs.samples.rollouts import TABLE, check_name, saved_steps
from siirl_dask.schema import decoded
from siirl_dask.tables import decoded_column

STEP = "step"
"""int64. The step of a row, which the name of its folder says."""
_READERS = 16  # threads that read footers: on an object store each takes some round trips


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A part of a step that is whole."""

    url: str
    step: int

    def schema(self) -> pa.Schema:
        """Return the columns of its rows. DataError for a damaged part."""
        fs, path = open_fs(self.url)
        try:
            own = read_footer(fs, path).schema
        except (StorageError, FileNotFoundError) as error:
            raise DataError(f"{self.url!r} cannot be read: {error}") from error
        return own.remove_metadata().append(pa.field(STEP, pa.int64()))

    def read(self, schema: pa.Schema) -> pa.Table:
        """Return its rows, of which each has the ``step``, with the columns of ``schema``, as
        ``common_schema`` returns it: those that the part lacks are null. DataError for a damaged
        part, and for one that was removed meanwhile.
        """
        fs, path = open_fs(self.url)
        try:
            footer = read_footer(fs, path)
            groups = [
                read_rows(fs, path, group, footer.schema.names, footer.groups)
                for group in range(len(footer.groups))
            ]
        except (StorageError, FileNotFoundError) as error:
            raise DataError(f"{self.url!r} cannot be read: {error}") from error
        table = pa.concat_tables([footer.schema.empty_table(), *groups])
        table = table.replace_schema_metadata(None)
        table = table.append_column(STEP, pa.array([self.step] * table.num_rows, pa.int64()))
        columns = []
        for field in schema:
            if field.name in table.column_names:
                columns.append(decoded_column(table[field.name]).cast(field.type))
            else:
                columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
        return pa.table(columns, schema=schema)


def common_schema(parts: Sequence[SamplePart]) -> pa.Schema:
    """Return the columns of all parts, in types that hold the values of each, without dictionaries:
    a start that resumes a run may save others than the one before.

    DataError for a column of which no type holds all values, and for a damaged part.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        schemas = list(readers.map(SamplePart.schema, parts))
    steps: dict[pa.Schema, int] = {}
    for part, schema in zip(parts, schemas, strict=True):
        own = pa.schema([field.with_type(decoded(field.type)) for field in schema])
        steps.setdefault(own, part.step)
    try:
        return pa.unify_schemas(list(steps), promote_options="permissive")
    except pa.ArrowException as error:
        problem = next(_disagreements(steps), str(error))
        raise DataError(
            f"the parts have no columns in common: {problem}; ask for steps of one kind (steps=), "
            "or by SQL, as in run.run.rollouts"
        ) from error


def _disagreements(steps: Mapping[pa.Schema, int]) -> Iterator[str]:
    """Yield a clause for each column of which no type holds the values of all ``steps``, the first
    one of each schema.
    """
    seen: dict[str, tuple[pa.Field, int]] = {}
    for schema, step in steps.items():
        for field in schema:
            known, first = seen.setdefault(field.name, (field, step))
            try:
                pa.unify_schemas(
                    [pa.schema([known]), pa.schema([field])], promote_options="permissive"
                )
            except pa.ArrowException:
                yield f"{field.name!r} is {known.type} in step {first} and {field.type} in step {step}"


def sample_parts(
    url: str, *, table: str = TABLE, steps: Sequence[int] | None = None
) -> list[SamplePart]:
    """Return the parts of every step that is whole in a table of the run at ``url``, or of those
    of ``steps``, in the order of the steps.

    DataError where there are none, and for storage that cannot be read; ConfigError for ``steps``
    that are no steps.
    """
    wanted = None
    if steps is not None:
        wanted = _numbers(steps)
    check_name(table)
    try:
        fs, root = open_fs(join(url, table))
        whole = saved_steps(fs, root).whole
    except StorageError as error:
        raise DataError(str(error)) from error
    except SiirlError:
        raise
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise DataError(f"{url!r} cannot be read: {type(error).__name__}: {error}") from error
    found = []
    for step, parts in whole.items():
        if wanted is None or step in wanted:
            for part in parts:
                found.append(SamplePart(join(url, table, part), step))
    if not found and whole:
        there = f"{min(whole)} to {max(whole)}"
        raise DataError(
            f"no step of steps={steps!r:.100} is whole in the table {table!r} of {url!r}: it has "
            f"{counted(len(whole), 'step')}, from {there}"
        )
    if not found:
        raise DataError(
            f"{url!r} has no whole step in the table {table!r} yet: expected the folder of a run "
            f"that has finished a step{hint_if_absent(url)}"
        )
    return found


def _numbers(steps: object) -> set[int]:
    """Return the steps that a caller asks for, of any collection of whole numbers."""
    if isinstance(steps, Iterable) and not isinstance(steps, str | bytes):
        numbers = [*steps]
        if all(isinstance(number, Integral) for number in numbers):
            return {int(number) for number in numbers}
    raise ConfigError(f"steps={steps!r:.100}: expected a list of steps, as in steps=[1, 2]")
