"""The table ``trace`` of a run, ``<run.url>/trace/step=000007/``: what each worker did during a
step.

Each worker writes one part, whose name has the number of the start of the run: the parts of the
highest number count. Nothing commits them: a trace may lack the last step of a worker that was
killed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.errors import DataError
from siirl_dask.trace import Entry, Lane

SCHEMA = pa.schema(
    {
        "worker": pa.string(),
        "lane": pa.string(),
        "what": pa.string(),
        "name": pa.string(),
        "beside": pa.bool_(),
        "phase": pa.string(),
        "sequence": pa.int64(),
        "start": pa.int64(),
        "duration": pa.int64(),
        "amount": pa.int64(),
        "clock": pa.string(),
        "offset": pa.int64(),
    }
)
"""Columns of a part: see ``siirl_dask.trace.Entry``. ``start`` is read off ``clock``; with
``offset`` it becomes nanoseconds since the epoch by the scheduler's clock."""


_LANES = {str(lane): lane for lane in Lane}


class TraceSpan(NamedTuple):
    """One thing that a worker did, from ``start`` to ``end``, in nanoseconds of a clock that all
    workers share.
    """

    step: int
    worker: str
    lane: Lane
    what: str
    name: str
    beside: bool
    phase: str
    sequence: int
    start: int
    duration: int
    amount: int | None

    @property
    def end(self) -> int:
        return self.start + self.duration

    @property
    def is_count(self) -> bool:
        return self.what == "count"


def trace_table(entries: Sequence[Entry], worker: str, clock: str, offset: int) -> pa.Table:
    """Return the entries of a worker as a part of the table."""
    constant = {"worker": worker, "clock": clock, "offset": offset}
    columns = []
    for field in SCHEMA:
        if field.name in constant:
            values = [constant[field.name]] * len(entries)
        else:
            values = [getattr(entry, field.name) for entry in entries]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=SCHEMA)


def read_spans(
    parts: Iterable[tuple[int, pa.Table]], counts: Collection[str] | None = None
) -> list[TraceSpan]:
    """Return the spans of parts, each with its step, by one clock, in the order of their starts.

    Workers with the same clock are aligned exactly, others by their offsets. ``counts`` are the
    lanes whose counts are returned as well, None: all; many rows are points of counts. DataError
    for a part with other columns or values than the table has.
    """
    steps: list[int] = []
    tables: list[pa.Table] = []
    for step, table in parts:
        if table.num_rows:
            steps.append(step)
            tables.append(_with_columns(table))
    if not tables:
        return []
    lengths = [table.num_rows for table in tables]
    whole = pa.concat_tables(tables)
    _check(whole, lengths)
    first = np.cumsum([0, *lengths[:-1]])
    clocks = whole["clock"].take(first).to_pylist()
    ahead = whole["offset"].take(first).to_pylist()
    offsets: dict[str, list[int]] = {}
    for clock, offset in zip(clocks, ahead, strict=True):
        offsets.setdefault(clock, []).append(offset)
    shift = {clock: statistics.median_low(values) for clock, values in offsets.items()}
    shifts = np.repeat(np.array([shift[clock] for clock in clocks], np.int64), lengths)
    whole = whole.set_column(
        SCHEMA.names.index("start"), "start", pa.array(whole["start"].to_numpy() + shifts)
    )
    whole = whole.append_column("step", pa.array(np.repeat(steps, lengths)))
    if counts is not None:
        points = pc.equal(whole["what"], "count")
        whole = whole.filter(
            pc.or_(
                pc.invert(points), pc.is_in(whole["lane"], pa.array(sorted(counts), pa.string()))
            )
        )
    # Of two that begin together the longer is around the other; of two as long the one that ended
    # later, which is last
    order = np.lexsort(
        (-np.arange(whole.num_rows), -whole["duration"].to_numpy(), whole["start"].to_numpy())
    )
    columns = {
        name: _values(whole[name].combine_chunks().take(order)) for name in TraceSpan._fields
    }
    columns["lane"] = [_LANES[lane] for lane in columns["lane"]]
    return list(map(TraceSpan, *columns.values()))


def _values(column: pa.Array) -> list[Any]:
    """Return a column as Python's values, a text once for all its rows: much faster than
    ``to_pylist``.
    """
    if pa.types.is_string(column.type):
        coded = column.dictionary_encode()
        texts = coded.dictionary.to_pylist()
        return [texts[code] for code in coded.indices.to_numpy().tolist()]
    if not column.null_count:
        return list(column.to_numpy(zero_copy_only=False).tolist())
    filled = column.fill_null(0).to_numpy().tolist()
    known = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if here else None for value, here in zip(filled, known, strict=True)]


def in_order(workers: Iterable[str]) -> list[str]:
    """Return workers' names sorted, those that are numbers by their value and first."""
    return sorted(
        workers, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )


def _with_columns(table: pa.Table) -> pa.Table:
    """Return the part with the table's columns alone."""
    if table.schema.equals(SCHEMA):
        return table
    missing = [field.name for field in SCHEMA if field.name not in table.column_names]
    if missing:
        raise DataError(
            f"a part of the trace lacks {missing}: another version of siirl_dask wrote it"
        )
    table = table.select(SCHEMA.names)
    if table.schema.types != SCHEMA.types:
        raise DataError(f"a part of the trace has columns {table.schema}: expected {SCHEMA}")
    return table.cast(SCHEMA)


def _check(whole: pa.Table, lengths: Sequence[int]) -> None:
    """Raise DataError unless the rows of parts that have ``lengths`` rows are what a worker
    writes.
    """
    for name in SCHEMA.names:
        if name != "amount" and (nulls := whole[name].null_count):
            raise DataError(f"a part of the trace has no {name!r} in {nulls} of its rows")
    strange = [lane for lane in whole["lane"].unique().to_pylist() if lane not in _LANES]
    if strange:
        raise DataError(
            f"a part of the trace has the lane {strange[0]!r}: expected one of "
            f"{', '.join(sorted(_LANES))}"
        )
    if pc.min(whole["duration"]).as_py() < 0:
        raise DataError("a part of the trace has a negative duration")
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    for name in ("worker", "clock", "offset"):
        if not pc.all(pc.equal(whole[name], whole[name].take(first))).as_py():
            raise DataError("a part of the trace has rows of several workers")
