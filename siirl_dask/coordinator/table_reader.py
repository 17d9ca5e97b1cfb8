"""Reads rows of a dataset's sources under the data plane's names of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import Snapshot

from siirl_dask.coordinator.data_order import RowPosition
from siirl_dask.coordinator.row_reader import RowReader
from siirl_dask.coordinator.source import Dataset, Source, open_source
from siirl_dask.schema import (
    ANSWER,
    DATA_PART,
    DATA_ROW,
    IDENTITY,
    ORIGIN,
    PROMPT,
    SOURCE_NAME,
    TYPES,
    path_steps,
)
from siirl_dask.tables import Ints


def table_readers(dataset: Dataset) -> list[TableReader]:
    """Return a reader for each source of a dataset that is open."""
    if isinstance(dataset, Source):
        return [TableReader(dataset, None, Fraction(1))]
    weight = sum(share.weight for share in dataset.shares)
    return [
        TableReader(share.source, share.name, share.weight / weight) for share in dataset.shares
    ]


class TableReader:
    """Reads rows of one source under the data plane's names."""

    def __init__(self, source: Source, name: str | None, part: Fraction) -> None:
        """``name`` is that of a mixture's source; ``part`` is how much of what a worker holds
        ahead is for it.
        """
        snapshot = open_source(source)
        self.limit = source.read_limit
        self._name = name
        self._known = snapshot.schema.names
        self._renamed = {PROMPT: source.prompt, ANSWER: source.answer}
        self._rows = RowReader(source.url, snapshot, source.read_limit, int(source.keep * part))
        self._origins = _origins(snapshot)

    def read(
        self,
        rows: Sequence[RowPosition],
        following: Sequence[Ints],
        schema: pa.Schema,
    ) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Return columns of the rows by name: their place in the table, and those of ``schema``.

        A column that the table does not have is null. ``following`` as for ``RowReader.read``.
        """
        origins = [self._origins[row.group] for row in rows]
        parts = []
        numbers = []
        for row, (part, first) in zip(rows, origins, strict=True):
            parts.append(part)
            numbers.append(first + row.row)
        columns: dict[str, pa.Array | pa.ChunkedArray] = {
            DATA_PART: pa.array(parts, TYPES[DATA_PART]),
            DATA_ROW: pa.array(numbers, TYPES[DATA_ROW]),
        }
        own = (*IDENTITY, *ORIGIN)
        paths = {name: self._steps(name) for name in schema.names if name not in own}
        if self._name is not None and SOURCE_NAME in paths:
            del paths[SOURCE_NAME]
            columns[SOURCE_NAME] = pa.repeat(pa.scalar(self._name, TYPES[SOURCE_NAME]), len(rows))
        top_level = {path[0] for path in paths.values()}
        names = tuple(sorted(top_level.intersection(self._known)))
        table = None
        if names:
            table = self._rows.read(rows, following, names)
        for name, path in paths.items():
            column, *rest = path  # into the structs of the table
            if table is None or column not in names:
                columns[name] = pa.nulls(len(rows), schema.field(name).type)
            elif rest:
                columns[name] = pc.struct_field(table[column], rest)
            else:
                columns[name] = table[column]
        return columns

    def _steps(self, name: str) -> list[str]:
        """Return the names that lead to the values of a column of the plan in this table."""
        if name in self._renamed:
            return path_steps(self._renamed[name], self._known)
        first, *rest = path_steps(name, self._known)
        if rest and first in self._renamed:
            return [*path_steps(self._renamed[first], self._known), *rest]
        return [first, *rest]


def _origins(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return, for each row group, the index of its part and the number of its first row there."""
    index = {part.path: number for number, part in enumerate(snapshot.parts)}
    before: Counter[str] = Counter()
    origins = []
    for group in snapshot.row_groups():
        origins.append((index[group.part], before[group.part]))
        before[group.part] += group.rows
    return origins
