"""The Dataloader: each worker reads its own rows of a dataset, ahead of time, in an order that all
workers agree on.

Its position is the step, so a run resumes at any step and on any number of workers. Once a step has
drawn more prompts than its own (``draw_prompts``), the position is the number of the next prompt,
which all loading workers count alike; checkpoints keep it (``position``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import FooterCache, RowGroup, Snapshot, StorageError, TooLarge

from siirl_dask.coordinator.data_order import GlobalOrder, MixedOrder, RowPosition
from siirl_dask.coordinator.source import (
    Dataset,
    Mixture,
    Source,
    dataset_schema,
    open_source,
    opened,
    source_schema,
)
from siirl_dask.errors import DataError
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
    SOURCE_NAME,
    TOKENS,
    TYPES,
    decoded,
    with_large_offsets,
)
from siirl_dask.tables import Ints, decode_column, split

# Reads a dataset's rows out of its row groups, and holds the next ones of each group within a
# budget.
#
# A row group is decoded batch by batch. Rows that the following steps need are taken out of it in
# the same pass, as many as fit into the budget, so that it is not decoded once for each row; all
# others are dropped at once.


_UNPACKED = 4  # times its bytes in the file that a row is guessed to take


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """Rows of a row group, in ascending order."""

    table: pa.Table
    rows: Ints
    """Number of each row in the group."""
    nbytes: int

    @staticmethod
    def of(table: pa.Table, rows: Ints) -> _HeldRows:
        return _HeldRows(table, rows, int(table.nbytes) + rows.nbytes)

    def has(self, rows: Ints) -> bool:
        places = np.searchsorted(self.rows, rows)
        if (places == len(self.rows)).any():
            return False
        return bool((self.rows[places] == rows).all())

    def slice(self, row: int) -> pa.Table:
        """Return one row, which is held."""
        return self.table.slice(int(np.searchsorted(self.rows, row)), 1)


class RowReader:
    """Reads rows of one snapshot. Belongs to one thread.

    Args:
        name: The dataset, for errors.
        read_limit: Bytes that the rows of one call, or a row group, may take once decoded.
        keep: Bytes of rows that are held for later calls.
    """

    def __init__(self, name: str, snapshot: Snapshot, read_limit: int, keep: int) -> None:
        self._name = name
        self._snapshot = snapshot
        self._groups: Sequence[RowGroup] = snapshot.row_groups()
        self._limit = read_limit
        self._footers = FooterCache()
        self._keep = keep
        self._held: dict[tuple[int, tuple[str, ...]], _HeldRows] = {}  # least recently used first
        self._held_bytes = 0
        stored = sum(part.nbytes for part in snapshot.parts) // max(1, snapshot.num_rows)
        self._read_rows = 1  # both are a guess, until a row group has been read
        self._read_bytes = 1 + _UNPACKED * stored

    def read(
        self, rows: Sequence[RowPosition], following: Sequence[Ints], columns: tuple[str, ...]
    ) -> pa.Table:
        """Return ``columns`` of the rows, in their order, with offsets of 64 bits.

        ``following`` are, for each row, those of the same row group that will be asked for next, in
        order.

        DataError for a file that cannot be read, or rows that take more than the limit.
        """
        by_group: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_group.setdefault(row.group, []).append(number)
        sources: list[_HeldRows | None] = [None] * len(rows)
        for group, numbers in by_group.items():
            budget = self._keep * len(numbers) // len(rows)
            wanted = np.array([rows[number].row for number in numbers], np.int64)
            held = self._hold(
                group, columns, wanted, [following[number] for number in numbers], budget
            )
            for number in numbers:
                sources[number] = held
        slices = []
        size = 0
        for row, source in zip(rows, sources, strict=True):
            assert source is not None
            slices.append(source.slice(row.row))
            size += int(slices[-1].nbytes)
            if size > self._limit:
                raise too_large(
                    f"dataset {self._name!r}", f"a step of {len(rows)} rows", size, self._limit
                )
        return pa.concat_tables(slices).combine_chunks()

    def _hold(
        self,
        group: int,
        columns: tuple[str, ...],
        wanted: Ints,
        following: Sequence[Ints],
        budget: int,
    ) -> _HeldRows:
        """Return a group's rows with those that are wanted, read now if they are not held
        already.
        """
        held = self._held.pop((group, columns), None)
        if held is not None:
            self._held_bytes -= held.nbytes
        if held is None or not held.has(wanted):
            held = self._read(group, columns, wanted, following, budget)
        self._held[group, columns] = held  # at the end: the dict's order is that of use
        self._held_bytes += held.nbytes
        self._shrink()
        return held

    def _read(
        self,
        group: int,
        columns: tuple[str, ...],
        wanted: Ints,
        following: Sequence[Ints],
        budget: int,
    ) -> _HeldRows:
        fitting = budget * self._read_rows // self._read_bytes  # so many rows of the mean size
        chosen = _with_following(wanted, following, fitting)
        held = _HeldRows.of(self._decode(self._groups[group], columns, chosen), chosen)
        self._read_rows += len(chosen)
        self._read_bytes += held.nbytes
        if held.nbytes <= budget:
            return held
        # longer ones than before
        fewer = _with_following(wanted, following, len(chosen) * budget // held.nbytes)
        return _HeldRows.of(held.table.take(pa.array(np.searchsorted(chosen, fewer))), fewer)

    def _decode(self, group: RowGroup, columns: tuple[str, ...], rows: Ints) -> pa.Table:
        try:
            table = self._snapshot.read_row_group(
                group, columns, rows=rows.tolist(), max_bytes=self._limit, footers=self._footers
            )
        except TooLarge as error:
            raise too_large(
                f"dataset {self._name!r}", error.where, error.nbytes, self._limit
            ) from error
        except StorageError as error:
            raise DataError(f"dataset {self._name!r}: {error}") from error
        large = pa.schema(
            [
                pa.field(field.name, with_large_offsets(decoded(field.type)))
                for field in table.schema
            ]
        )
        columns_decoded = [decode_column(table[field.name], field.type) for field in large]
        table = pa.Table.from_arrays(columns_decoded, schema=large)
        if table.nbytes > self._limit:  # a dictionary has each text once
            raise too_large(
                f"dataset {self._name!r}",
                f"a row group of {group.part!r}",
                table.nbytes,
                self._limit,
            )
        return table.combine_chunks()

    def _shrink(self) -> None:
        """Drop what was not used for longest, until the rest fits the budget."""
        while self._held and self._held_bytes > self._keep:
            oldest = next(iter(self._held))
            self._held_bytes -= self._held.pop(oldest).nbytes


def too_large(dataset: str, what: str, nbytes: int, limit: int) -> DataError:
    """Return the error for ``what``, which takes more than may be read at once."""
    return DataError(
        f"{dataset}: {what} takes at least {nbytes} bytes once decoded, and a worker may read "
        f"{limit} at once (data.read_limit; as data.memory_limit where it is not set): raise it, "
        "lower data.batch_size, or write the dataset with smaller row groups"
    )


def _with_following(wanted: Ints, following: Sequence[Ints], count: int) -> Ints:
    """Return the rows that are wanted, and up to ``count`` with those that are wanted soonest,
    in ascending order.
    """
    soonest: Iterator[int | None] = (row for rows in zip_longest(*following) for row in rows)
    ahead = islice((int(row) for row in soonest if row is not None), max(0, count - len(wanted)))
    return np.array(sorted({*wanted.tolist(), *ahead}), np.int64)


__all__ = ["Dataloader", "Source", "open_source", "source_schema"]


class Dataloader:
    """Reads one worker's rows of one dataset, one step ahead, in a thread of its own.

    DataError names the file that cannot be read.
    """

    def __init__(self, dataset: Dataset, position: int | None = None) -> None:
        """``position`` is that of a checkpoint's dataloader, whichever worker's it was."""
        dataset = opened(dataset)
        self._batch_size = dataset.batch_size
        self._schema = dataset_schema(dataset)
        self._order = _order(dataset)
        self._tables = _table_readers(dataset)
        self._reader = ThreadPoolExecutor(1, "siirl-dataloader")
        self._ahead: dict[_StepPart, Future[pa.Table]] = {}
        self._drawn = range(position or 0, position or 0)  # numbers of the last step's prompts
        self._drew_more = position is not None  # from then on steps follow the last number

    @property
    def position(self) -> int | None:
        """Number of the next prompt; None while it follows from the step."""
        return self._drawn.stop if self._drew_more else None

    def load(self, step: int, columns: Sequence[str], index: int, count: int) -> pa.Table:
        """Return the rows of worker ``index`` of ``count`` in ``step``, by position, and read
        the next step's ahead.
        """
        self._drawn = self._step_numbers(step)
        wanted = _StepPart(self._drawn, tuple(columns), index, count)
        future = self._ahead.pop(wanted, None)
        if future is None:
            future = self._reader.submit(self._read, wanted)
        following = replace(wanted, numbers=self._step_numbers(step + 1))
        if self._batch_size is not None and not self._drew_more and following not in self._ahead:
            self._ahead[following] = self._reader.submit(self._read, following)
        return future.result()

    def draw_prompts(self, wanted: int, columns: Sequence[str], index: int, count: int) -> pa.Table:
        """Return worker ``index``'s part of the next ``wanted`` prompts. Positions go on from the
        step's last.

        All ``count`` workers must call it alike, with the same number and in the same steps.
        """
        first = self._drawn.start
        start, stop = split(wanted, count)[index]
        numbers = range(self._drawn.stop + start, self._drawn.stop + stop)
        rows = [self._order.row_position(number, number - first) for number in numbers]
        self._drawn = range(first, self._drawn.stop + wanted)
        self._drew_more = True
        self._ahead.clear()  # what was read ahead is no longer what the next step begins with
        return self._reader.submit(self._read_rows, rows, tuple(columns)).result()

    def seek(self, position: int) -> None:
        """Go on with the prompt of that number, as ``position`` returned it after an earlier
        step.
        """
        self._drawn = range(position, position)
        self._drew_more = True
        self._ahead.clear()

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _step_numbers(self, step: int) -> range:
        if not self._drew_more:
            return self._order.prompt_numbers(step)
        return range(self._drawn.stop, self._drawn.stop + (self._batch_size or 0))

    def _read(self, part: _StepPart) -> pa.Table:
        rows = self._order.worker_rows(part.numbers, part.index, part.count)
        return self._read_rows(rows, part.columns)

    def _read_rows(self, rows: Sequence[RowPosition], columns: tuple[str, ...]) -> pa.Table:
        schema = pa.schema([self._schema.field(name) for name in columns])
        by_source: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            by_source.setdefault(row.source, []).append(place)
        if not by_source:
            return schema.empty_table()
        if len(by_source) == 1:
            return self._read_source(rows, schema)
        parts = [
            self._read_source([rows[place] for place in places], schema)
            for places in by_source.values()
        ]
        size = sum(int(part.nbytes) for part in parts)
        limit = self._tables[0].limit
        if size > limit:
            raise too_large("the mixture", f"a step of {len(rows)} rows", size, limit)
        order = np.argsort(np.concatenate([*by_source.values()]))
        return pa.concat_tables(parts).take(pa.array(order)).combine_chunks()

    def _read_source(self, rows: Sequence[RowPosition], schema: pa.Schema) -> pa.Table:
        """Return rows that are all from one source, with their identity columns."""
        table = self._tables[rows[0].source]
        position = pa.array([row.position for row in rows], pa.int64())
        numbers = pa.array([row.number for row in rows], TYPES[PROMPT_NUMBER])
        tokens = pa.array(np.zeros(len(rows), "i8"))
        columns = {ROW_ID: position, GROUP_ID: position, TOKENS: tokens, PROMPT_NUMBER: numbers}
        following = [self._order.following_rows(row.number) for row in rows]
        columns |= table.read(rows, following, schema)
        return pa.table([columns[name] for name in schema.names], schema=schema).combine_chunks()


@dataclass(frozen=True, slots=True)
class _StepPart:
    """The part of a step that one worker reads."""

    numbers: range
    """The step's prompts."""
    columns: tuple[str, ...]
    index: int
    """The worker's, of ``count``."""
    count: int


class _TableReader:
    """Reads rows of one source under the data plane's names."""

    def __init__(self, source: Source, name: str | None, part: Fraction) -> None:
        """``name`` is that of a mixture's source; ``part`` is how much of what a worker holds
        ahead is for it.
        """
        snapshot = open_source(source)
        self.limit = source.read_limit
        self._name = name
        self._known = snapshot.schema.names
        self._paths = {PROMPT: source.prompt, ANSWER: source.answer}
        self._rows = RowReader(source.url, snapshot, source.read_limit, int(source.keep * part))
        self._origins = _origins(snapshot)

    def read(
        self, rows: Sequence[RowPosition], following: Sequence[Ints], schema: pa.Schema
    ) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Return the columns of ``schema`` that say where a row is in the table, and the table's
        own.

        One that the table does not have is null.
        """
        origins = [self._origins[row.group] for row in rows]
        numbers = [first + row.row for row, (_, first) in zip(rows, origins, strict=True)]
        columns: dict[str, pa.Array | pa.ChunkedArray] = {
            DATA_PART: pa.array([part for part, _ in origins], TYPES[DATA_PART]),
            DATA_ROW: pa.array(numbers, TYPES[DATA_ROW]),
        }
        own = (*IDENTITY, *ORIGIN)
        paths = {name: self._paths.get(name, name) for name in schema.names if name not in own}
        if self._name is not None and SOURCE_NAME in paths:
            del paths[SOURCE_NAME]
            columns[SOURCE_NAME] = pa.repeat(pa.scalar(self._name, TYPES[SOURCE_NAME]), len(rows))
        firsts = {path.split(".")[0] for path in paths.values()}
        names = tuple(sorted(firsts.intersection(self._known)))
        table = self._rows.read(rows, following, names) if names else None
        for name, path in paths.items():
            if table is not None and path.split(".")[0] in names:
                columns[name] = _extract(table, path)
            else:
                columns[name] = pa.nulls(len(rows), schema.field(name).type)
        return columns


def _order(dataset: Dataset) -> GlobalOrder | MixedOrder:
    """Return the order of a dataset that is open."""
    sizes = [
        [group.rows for group in open_source(source).row_groups()] for source in dataset.sources
    ]
    if isinstance(dataset, Mixture):
        return MixedOrder(
            sizes, [share.weight for share in dataset.shares], dataset.batch_size, dataset.seed
        )
    return GlobalOrder(sizes[0], dataset.batch_size or sum(sizes[0]), dataset.seed)


def _table_readers(dataset: Dataset) -> list[_TableReader]:
    if isinstance(dataset, Source):
        return [_TableReader(dataset, None, Fraction(1))]
    weight = sum(share.weight for share in dataset.shares)
    return [
        _TableReader(share.source, share.name, share.weight / weight) for share in dataset.shares
    ]


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
