"""The table ``trace`` of a run, ``<run.url>/trace/step=000007/``: what each worker did during a step.

Each worker writes one part, whose name has the number of the start of the run: the parts of the highest number count.
Nothing commits them: a trace may lack the last step of a worker that was killed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

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
"""Columns of a part: see ``siirl_dask.trace.Entry``. ``start`` is read off ``clock``; with ``offset`` it becomes
nanoseconds since the epoch by the scheduler's clock."""


class TraceSpan(NamedTuple):
    """One thing that a worker did, from ``start`` to ``end``, in nanoseconds of a clock that all workers share."""

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
    columns = zip(*entries, strict=True) if entries else ((),) * len(Entry._fields)
    named = dict(zip(Entry._fields, map(list, columns), strict=True))
    constant = {"worker": worker, "clock": clock, "offset": offset}
    same = {name: [value] * len(entries) for name, value in constant.items()}
    return pa.table([pa.array((named | same)[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def read_spans(parts: Iterable[tuple[int, pa.Table]]) -> list[TraceSpan]:
    """Return the spans of parts, each with its step, by one clock, in the order of their starts.

    Workers with the same clock are aligned exactly, others by their offsets. DataError for a part with other columns
    or values than the table has.
    """
    tables = [(step, _checked(table)) for step, table in parts if table.num_rows]
    offsets: dict[str, list[int]] = {}
    for _, table in tables:
        offsets.setdefault(table["clock"][0].as_py(), []).append(table["offset"][0].as_py())
    ahead = {clock: statistics.median_low(values) for clock, values in offsets.items()}
    spans = []
    for step, table in tables:
        shift = ahead[table["clock"][0].as_py()]
        columns = [table[name].to_pylist() for name in SCHEMA.names[:-2]]
        spans += [
            TraceSpan(step, worker, Lane(lane), what, name, beside, phase, number, start + shift, duration, amount)
            for worker, lane, what, name, beside, phase, number, start, duration, amount in zip(*columns, strict=True)
        ]
    spans.reverse()  # of two that are as long, the one that ended later is around the other
    return sorted(spans, key=lambda span: (span.start, -span.duration))


def in_order(workers: Iterable[str]) -> list[str]:
    """Return workers' names sorted, those that are numbers by their value and first."""
    return sorted(workers, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def _checked(table: pa.Table) -> pa.Table:
    if missing := [field.name for field in SCHEMA if field.name not in table.column_names]:
        raise DataError(f"a part of the trace lacks {missing}: another version of siirl_dask wrote it")
    table = table.select(SCHEMA.names)
    if table.schema.types != SCHEMA.types:
        raise DataError(f"a part of the trace has columns {table.schema}: expected {SCHEMA}")
    for name in SCHEMA.names:
        if name != "amount" and table[name].null_count:
            raise DataError(f"a part of the trace has no {name!r} in {table[name].null_count} of its rows")
    known = set(Lane)
    if strange := [lane for lane in table["lane"].unique().to_pylist() if lane not in known]:
        raise DataError(f"a part of the trace has the lane {strange[0]!r}: expected one of {', '.join(sorted(known))}")
    if min(table["duration"].to_pylist()) < 0:
        raise DataError("a part of the trace has a negative duration")
    if any(len(table[name].unique()) > 1 for name in ("worker", "clock", "offset")):
        raise DataError("a part of the trace has rows of several workers")
    return table
