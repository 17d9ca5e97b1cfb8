"""The Dataloader: each worker reads its own rows of a dataset, ahead of time, in an order that all workers agree on.

Its position is the step, so a run resumes at any step and on any number of workers. Once a step has drawn more prompts
than its own (``draw_prompts``), the position is the number of the next prompt, which all loading workers count alike;
checkpoints keep it (``position``).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import RowGroup, Snapshot, StorageError, open_table

from siirl_dask.coordinator.data_order import GlobalOrder, RowPosition
from siirl_dask.coordinator.layout.balance import split
from siirl_dask.coordinator.transport.frames import check_types
from siirl_dask.errors import DataError, did_you_mean
from siirl_dask.schema import ANSWER, GROUP_ID, IDENTITY, PROMPT, ROW_ID, TOKENS, TYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A dataset and how it is read. ``prompt`` and ``answer`` name columns; a dot goes into a struct.

    ``batch_size`` None reads everything in one step; ``seed`` None keeps the table's order.
    """

    url: str
    prompt: str
    answer: str
    batch_size: int | None = None
    seed: int | None = None


def open_source(source: Source) -> Snapshot:
    """Open the table behind ``source``.

    DataError when it is missing, corrupt, empty, or lacks the columns, and when its storage cannot be reached.
    """
    try:
        snapshot = open_table(source.url)
    except StorageError as error:
        raise DataError(f"dataset {source.url!r}: {error}") from error
    except Exception as error:  # drivers of remote storage raise what they like
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"dataset {source.url!r}: its storage cannot be reached: {reason}") from error
    if snapshot.num_rows == 0:
        raise DataError(f"dataset {source.url!r} has no rows: expected at least one")
    source_schema(snapshot.schema, source)
    return snapshot


def source_schema(schema: pa.Schema, source: Source) -> pa.Schema:
    """Return the columns that the dataloader gives: identity, ``prompt``, ``answer``, and all others as they are.

    DataError when a column is missing, has a reserved name, or has a type that cannot move between workers.
    """
    fields = {name: TYPES[name] for name in IDENTITY}
    fields |= {PROMPT: _column_type(schema, source.prompt, source), ANSWER: _column_type(schema, source.answer, source)}
    for field in schema:
        if field.name in IDENTITY:
            raise DataError(f"dataset {source.url!r} has a column {field.name!r}: rename it, that name is taken")
        fields.setdefault(field.name, field.type)
    loaded = pa.schema(fields)
    check_types(loaded)
    return loaded


def _column_type(schema: pa.Schema, path: str, source: Source) -> pa.DataType:
    names, kind = path.split("."), pa.struct(list(schema))
    for name in names:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            known = [field.name for field in kind] if pa.types.is_struct(kind) else []
            raise DataError(
                f"dataset {source.url!r} has no column {path!r}: "
                f"no {name!r} (there is: {known}){did_you_mean(name, known)}"
            )
        kind = kind.field(name).type
    return kind


class Dataloader:
    """Reads one worker's rows of one dataset, one step ahead, in a thread of its own.

    DataError names the file that cannot be read.
    """

    def __init__(self, source: Source, position: int | None = None) -> None:
        """``position`` is that of a checkpoint's dataloader, whichever worker's it was."""
        self._source = source
        self._snapshot = open_source(source)
        self._schema = source_schema(self._snapshot.schema, source)
        self._groups = self._snapshot.row_groups()
        batch_size = source.batch_size or self._snapshot.num_rows
        self._order = GlobalOrder([group.rows for group in self._groups], batch_size, source.seed)
        self._cache: dict[tuple[int, tuple[str, ...]], pa.Table] = {}  # touched by the reader's thread alone
        self._reader = ThreadPoolExecutor(1, "siirl-dataloader")
        self._ahead: dict[tuple[range, tuple[str, ...], int, int], Future[pa.Table]] = {}
        self._drawn = range(position or 0, position or 0)  # numbers of the last step's prompts
        self._drew_more = position is not None  # from then on steps follow the last number

    @property
    def position(self) -> int | None:
        """Number of the next prompt; None while it follows from the step."""
        return self._drawn.stop if self._drew_more else None

    def load(self, step: int, columns: Sequence[str], index: int, count: int) -> pa.Table:
        """Return the rows of worker ``index`` of ``count`` in ``step``, by position, and read the next step's ahead."""
        self._drawn = self._step_numbers(step)
        wanted = (self._drawn, tuple(columns), index, count)
        future = self._ahead.pop(wanted, None) or self._reader.submit(self._read, *wanted)
        following = (self._step_numbers(step + 1), *wanted[1:])
        if self._source.batch_size is not None and not self._drew_more and following not in self._ahead:
            self._ahead[following] = self._reader.submit(self._read, *following)
        return future.result()

    def draw_prompts(self, wanted: int, columns: Sequence[str], index: int, count: int) -> pa.Table:
        """Return worker ``index``'s part of the next ``wanted`` prompts. Positions go on from the step's last.

        All ``count`` workers must call it alike, with the same number and in the same steps.
        """
        first = self._drawn.start
        start, stop = split(wanted, count)[index]
        numbers = range(self._drawn.stop + start, self._drawn.stop + stop)
        rows = [self._order.row_position(number, number - first) for number in numbers]
        self._drawn, self._drew_more = range(first, self._drawn.stop + wanted), True
        self._ahead.clear()  # what was read ahead is no longer what the next step begins with
        return self._reader.submit(self._read_rows, rows, tuple(columns)).result()

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _step_numbers(self, step: int) -> range:
        if not self._drew_more:
            return self._order.prompt_numbers(step)
        return range(self._drawn.stop, self._drawn.stop + (self._source.batch_size or 0))

    def _read(self, numbers: range, columns: tuple[str, ...], index: int, count: int) -> pa.Table:
        return self._read_rows(self._order.worker_rows(numbers, index, count), columns)

    def _read_rows(self, rows: Sequence[RowPosition], columns: tuple[str, ...]) -> pa.Table:
        names = self._dataset_columns(columns)
        used = {(row.group, names) for row in rows}
        self._cache = {key: table for key, table in self._cache.items() if key in used}
        slices = [self._group(row.group, names).slice(row.row, 1) for row in rows] if names else []
        return self._shape(pa.concat_tables(slices) if slices else None, rows, columns)

    def _group(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        if (group, columns) not in self._cache:
            self._cache[group, columns] = self._read_group(self._groups[group], columns)
        return self._cache[group, columns]

    def _read_group(self, group: RowGroup, columns: tuple[str, ...]) -> pa.Table:
        try:
            return self._snapshot.read_row_group(group, columns)
        except StorageError as error:
            raise DataError(f"dataset {self._source.url!r}: {error}") from error

    def _dataset_columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the dataset's own names of the columns, without what only the dataloader knows."""
        paths = {PROMPT: self._source.prompt, ANSWER: self._source.answer}
        return tuple(sorted({paths.get(name, name).split(".")[0] for name in columns if name not in IDENTITY}))

    def _shape(self, table: pa.Table | None, rows: Sequence[RowPosition], columns: Sequence[str]) -> pa.Table:
        """Return the columns under the data plane's names, identity columns included. ``table`` is None for no other
        columns.
        """
        schema = pa.schema([self._schema.field(name) for name in columns])
        if not rows:
            return schema.empty_table()
        position = pa.array([row.position for row in rows], pa.int64())
        shaped = {ROW_ID: position, GROUP_ID: position, TOKENS: pa.array(np.zeros(len(rows), "i8"))}
        paths = {PROMPT: self._source.prompt, ANSWER: self._source.answer}
        for name in columns:
            if table is not None and name not in IDENTITY:
                shaped[name] = _extract(table, paths.get(name, name))
        return pa.table([shaped[name] for name in columns], schema=schema).combine_chunks()


def _extract(table: pa.Table, path: str) -> pa.ChunkedArray:
    first, *rest = path.split(".")
    return pc.struct_field(table[first], rest) if rest else table[first]
