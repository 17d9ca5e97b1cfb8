"""Dataloader: each worker reads its own partitions, ahead of time, in an order all workers agree on.

Its position is the step, so a run goes on at any step and on any number of workers; once a step has drawn more prompts
than its own (``more``), it is the number of the next prompt, which every worker that loads counts alike: ``position``,
which a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import RowGroup, Snapshot, StorageError, open_table

from siirl_dask.coordinator.balance import split
from siirl_dask.coordinator.frames import check_types
from siirl_dask.coordinator.order import GlobalOrder, Place
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
    """The table behind ``source``. DataError when it is missing, corrupt, empty, or has not the columns."""
    try:
        snapshot = open_table(source.url)
    except StorageError as error:
        raise DataError(f"dataset {source.url!r}: {error}") from error
    if snapshot.num_rows == 0:
        raise DataError(f"dataset {source.url!r} has no rows: expected at least one")
    source_schema(snapshot.schema, source)
    return snapshot


def source_schema(schema: pa.Schema, source: Source) -> pa.Schema:
    """Columns the dataloader gives: identity, ``prompt``, ``answer``, and every other column of the dataset as it
    is.
    """
    fields = {name: TYPES[name] for name in IDENTITY}
    fields |= {PROMPT: _column_type(schema, source.prompt, source), ANSWER: _column_type(schema, source.answer, source)}
    for field in schema:
        if field.name in IDENTITY:
            raise DataError(f"dataset {source.url!r} has a column {field.name!r}: rename it, that name is taken")
        fields.setdefault(field.name, field.type)
    given = pa.schema(fields)
    check_types(given)
    return given


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
    """One worker's reader of one dataset. DataError names the part that cannot be read."""

    def __init__(self, source: Source, position: int | None = None) -> None:
        """``position``: where an earlier one was, whatever worker's that was."""
        self._source = source
        self._snapshot = open_source(source)
        self._schema = source_schema(self._snapshot.schema, source)
        self._groups = self._snapshot.row_groups()
        batch_size = source.batch_size or self._snapshot.num_rows
        self._order = GlobalOrder([group.rows for group in self._groups], batch_size, source.seed)
        self._cache: dict[tuple[int, tuple[str, ...]], pa.Table] = {}
        self._reader = ThreadPoolExecutor(1, "siirl-dataloader")
        self._ahead: dict[tuple[range, tuple[str, ...], int, int], Future[pa.Table]] = {}
        self._drawn = range(position or 0, position or 0)  # numbers of the last step's prompts
        self._moved = position is not None

    @property
    def position(self) -> int | None:
        """The number of the next prompt, of all that were ever drawn; None while that follows from the step."""
        return self._drawn.stop if self._moved else None

    def load(self, step: int, columns: Sequence[str], index: int, count: int) -> pa.Table:
        """The rows of worker ``index`` of ``count`` in ``step``, by position; the next step's are then read ahead."""
        self._drawn = self._numbers(step)
        asked = (self._drawn, tuple(columns), index, count)
        future = self._ahead.pop(asked, None) or self._reader.submit(self._read, *asked)
        following = (self._numbers(step + 1), *asked[1:])
        if self._source.batch_size is not None and not self._moved and following not in self._ahead:
            self._ahead[following] = self._reader.submit(self._read, *following)
        return future.result()

    def more(self, wanted: int, columns: Sequence[str], index: int, count: int) -> pa.Table:
        """Worker ``index``'s part of the ``wanted`` prompts after those of the step so far; positions go on as well.

        All workers that load must call it alike, with as many, and in the same steps.
        """
        first = self._drawn.start
        begin, end = split(wanted, count)[index]
        places = [self._order.place(self._drawn.stop + at, self._drawn.stop + at - first) for at in range(begin, end)]
        self._drawn, self._moved = range(first, self._drawn.stop + wanted), True
        self._ahead.clear()
        return self._reader.submit(self._shaped, places, tuple(columns)).result()

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _numbers(self, step: int) -> range:
        if not self._moved:
            return self._order.numbers(step)
        return range(self._drawn.stop, self._drawn.stop + (self._source.batch_size or 0))

    def _read(self, numbers: range, columns: tuple[str, ...], index: int, count: int) -> pa.Table:
        return self._shaped(self._order.share(numbers, index, count), columns)

    def _shaped(self, places: Sequence[Place], columns: tuple[str, ...]) -> pa.Table:
        wanted = self._dataset_columns(columns)
        used = {(place.group, wanted) for place in places}
        self._cache = {key: table for key, table in self._cache.items() if key in used}
        rows = [self._group(place.group, wanted).slice(place.row, 1) for place in places] if wanted else []
        return self._shape(pa.concat_tables(rows) if rows else None, places, columns)

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
        paths = {PROMPT: self._source.prompt, ANSWER: self._source.answer}
        return tuple(sorted({paths.get(name, name).split(".")[0] for name in columns if name not in IDENTITY}))

    def _shape(self, rows: pa.Table | None, places: Sequence[Place], columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([self._schema.field(name) for name in columns])
        if not places:
            return schema.empty_table()
        position = pa.array([place.position for place in places], pa.int64())
        given = {ROW_ID: position, GROUP_ID: position, TOKENS: pa.array(np.zeros(len(places), "i8"))}
        for name in columns:
            if rows is not None and name not in IDENTITY:
                given[name] = _extract(rows, {PROMPT: self._source.prompt, ANSWER: self._source.answer}.get(name, name))
        return pa.table([given[name] for name in columns], schema=schema).combine_chunks()


def _extract(table: pa.Table, path: str) -> pa.ChunkedArray:
    first, *rest = path.split(".")
    return pc.struct_field(table[first], rest) if rest else table[first]
