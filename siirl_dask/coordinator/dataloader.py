"""The Dataloader: each worker reads its own rows of a dataset, ahead of time, in an order that all workers agree on.

Its position is the step, so a run resumes at any step and on any number of workers. Once a step has drawn more prompts
than its own (``draw_prompts``), the position is the number of the next prompt, which all loading workers count alike;
checkpoints keep it (``position``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import Snapshot, StorageError, open_table

from siirl_dask.config import DataConfig, parse_bytes
from siirl_dask.coordinator.data_order import GlobalOrder, RowPosition
from siirl_dask.coordinator.layout.balance import split
from siirl_dask.coordinator.row_reader import RowReader
from siirl_dask.coordinator.transport.frames import check_types
from siirl_dask.errors import DataError, did_you_mean
from siirl_dask.schema import (
    ANSWER,
    DATA_PART,
    DATA_ROW,
    GROUP_ID,
    IDENTITY,
    ORIGIN,
    PROMPT,
    PROMPT_NUMBER,
    ROW_ID,
    TOKENS,
    TYPES,
    with_large_offsets,
)

_OWN = (*IDENTITY, *ORIGIN)  # columns that the dataset does not have
_ROW = 8  # bytes that a row takes at least: its place in the order of its row group


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
    read_limit: int = 2 * 2**30
    """Bytes that a worker's rows of a step, or a row group, may take once decoded."""
    keep: int = 2**28
    """Bytes of rows that a worker holds for later steps."""

    @staticmethod
    def of(data: DataConfig, *, batch_size: int | None = None, seed: int | None = None) -> Source:
        """Return the dataset that ``data`` describes."""
        memory = parse_bytes("data.memory_limit", data.memory_limit)
        limit = memory if data.read_limit is None else parse_bytes("data.read_limit", data.read_limit)
        return Source(
            url=data.url,
            prompt=data.prompt,
            answer=data.answer,
            batch_size=batch_size,
            seed=seed,
            read_limit=limit,
            keep=memory // 8,
        )


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
    longest = max(snapshot.row_groups(), key=lambda group: group.rows)
    if longest.rows * _ROW > source.read_limit:
        raise DataError(
            f"dataset {source.url!r}: a row group of {longest.part!r} has {longest.rows} rows, more than the "
            f"{source.read_limit} bytes that may be read at once can hold (data.read_limit): raise it, or write the "
            "dataset with smaller row groups"
        )
    return snapshot


def source_schema(schema: pa.Schema, source: Source) -> pa.Schema:
    """Return the columns that the dataloader gives: identity, origin, ``prompt``, ``answer``, all others as they are.

    Texts, binary values and lists have offsets of 64 bits, whatever the files have: samples of a prompt repeat it.

    DataError when a column is missing, has a reserved name, or has a type that cannot move between workers.
    """
    fields = {name: TYPES[name] for name in _OWN}
    paths = {PROMPT: source.prompt, ANSWER: source.answer}
    fields |= {name: with_large_offsets(_column_type(schema, path, source)) for name, path in paths.items()}
    for field in schema:
        if field.name in _OWN:
            raise DataError(f"dataset {source.url!r} has a column {field.name!r}: rename it, that name is taken")
        fields.setdefault(field.name, with_large_offsets(field.type))
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
        self._rows = RowReader(source.url, self._snapshot, source.read_limit, source.keep)
        self._origins = _origins(self._snapshot)
        sizes = [group.rows for group in self._snapshot.row_groups()]
        batch_size = source.batch_size or self._snapshot.num_rows
        self._order = GlobalOrder(sizes, batch_size, source.seed)
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

    def seek(self, position: int) -> None:
        """Go on with the prompt of that number, as ``position`` gave it after an earlier step."""
        self._drawn, self._drew_more = range(position, position), True
        self._ahead.clear()

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
        if not names or not rows:
            return self._shape(None, rows, columns)
        following = [self._order.following_rows(row.number) for row in rows]
        return self._shape(self._rows.read(rows, following, names), rows, columns)

    def _dataset_columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the dataset's own names of the columns, without what only the dataloader knows."""
        paths = {PROMPT: self._source.prompt, ANSWER: self._source.answer}
        return tuple(sorted({paths.get(name, name).split(".")[0] for name in columns if name not in _OWN}))

    def _shape(self, table: pa.Table | None, rows: Sequence[RowPosition], columns: Sequence[str]) -> pa.Table:
        """Return the columns under the data plane's names, with those of identity and origin. ``table`` is None for
        no other columns.
        """
        schema = pa.schema([self._schema.field(name) for name in columns])
        if not rows:
            return schema.empty_table()
        position = pa.array([row.position for row in rows], pa.int64())
        origins = [self._origins[row.group] for row in rows]
        shaped = {
            ROW_ID: position,
            GROUP_ID: position,
            TOKENS: pa.array(np.zeros(len(rows), "i8")),
            PROMPT_NUMBER: pa.array([row.number for row in rows], TYPES[PROMPT_NUMBER]),
            DATA_PART: pa.array([part for part, _ in origins], TYPES[DATA_PART]),
            DATA_ROW: pa.array(
                [first + row.row for row, (_, first) in zip(rows, origins, strict=True)], TYPES[DATA_ROW]
            ),
        }
        paths = {PROMPT: self._source.prompt, ANSWER: self._source.answer}
        for name in columns:
            if table is not None and name not in _OWN:
                shaped[name] = _extract(table, paths.get(name, name))
        return pa.table([shaped[name] for name in columns], schema=schema).combine_chunks()


def _origins(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return, for each row group, the index of its part and the number of its first row there."""
    index = {part.path: number for number, part in enumerate(snapshot.parts)}
    before: Counter[str] = Counter()
    origins = []
    for group in snapshot.row_groups():
        origins.append((index[group.part], before[group.part]))
        before[group.part] += group.rows
    return origins


def _extract(table: pa.Table, path: str) -> pa.ChunkedArray:
    first, *rest = path.split(".")
    return pc.struct_field(table[first], rest) if rest else table[first]
