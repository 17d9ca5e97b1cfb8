"""The Dataloader: each worker reads its own rows of a dataset, ahead of time, in an order that all
workers agree on.

Its position is the step, so a run resumes at any step and on any number of workers. Once a step has
drawn more prompts than its own (``draw_prompts``), the position is the number of the next prompt,
which all loading workers count alike; checkpoints keep it (``position``).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.data_order import GlobalOrder, MixedOrder, RowPosition
from siirl_dask.coordinator.row_reader import too_large
from siirl_dask.coordinator.source import (
    Dataset,
    Mixture,
    Source,
    dataset_schema,
    open_source,
    opened,
    source_schema,
)
from siirl_dask.coordinator.table_reader import table_readers
from siirl_dask.schema import (
    GROUP_ID,
    PROMPT_NUMBER,
    ROW_ID,
    TOKENS,
    TYPES,
    type_at,
)
from siirl_dask.tables import split

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
        self._tables = table_readers(dataset)
        self._reader = ThreadPoolExecutor(1, "siirl-dataloader")
        self._ahead: dict[_StepPart, Future[pa.Table]] = {}
        first = 0 if position is None else position
        self._drawn = range(first, first)  # numbers of the last step's prompts
        # True once a step has drawn more prompts than its own: the next step's follow the last
        # one's, and no longer from the step's number
        self._drew_more = position is not None

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
        schema = pa.schema([(name, type_at(self._schema, name)) for name in columns])
        by_source: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            by_source.setdefault(row.source, []).append(place)
        if not by_source:
            return schema.empty_table()
        if len(by_source) == 1:
            return self._read_source(rows, schema)
        parts = []
        for places in by_source.values():
            rows_of_source = [rows[place] for place in places]
            parts.append(self._read_source(rows_of_source, schema))
        size = sum(int(part.nbytes) for part in parts)
        limit = self._tables[0].limit
        if size > limit:
            raise too_large("the mixture", f"a step of {len(rows)} rows", size, limit)
        order = np.argsort(np.concatenate(list(by_source.values())))
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


def _order(dataset: Dataset) -> GlobalOrder | MixedOrder:
    """Return the order of a dataset that is open."""
    sizes = []
    for source in dataset.sources:
        groups = open_source(source).row_groups()
        sizes.append([group.rows for group in groups])
    if isinstance(dataset, Mixture):
        weights = [share.weight for share in dataset.shares]
        return MixedOrder(sizes, weights, dataset.batch_size, dataset.seed)
    return GlobalOrder(sizes[0], dataset.batch_size or sum(sizes[0]), dataset.seed)
