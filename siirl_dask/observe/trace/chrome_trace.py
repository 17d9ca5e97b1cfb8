"""Converts a trace to the Trace Event format, which ui.perfetto.dev and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes it. A
worker is a process, and each lane a thread. Slices of one thread must lie within one another or
apart: what overlaps gets another thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.trace import Lane

_ORDER = (Lane.CONTROL, Lane.COMPUTE, Lane.ENGINE, Lane.WAIT, Lane.TRANSFER, Lane.STORAGE)
_THREADS = 64  # of a lane: as many overlapping slices can be shown


def chrome_trace(spans: Sequence[TraceSpan], run: str) -> dict[str, Any]:
    """Return the spans as an object of the format. Times are microseconds since the first span."""
    first = min((span.start for span in spans), default=0)
    by_worker: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        by_worker[span.worker].append(span)
    workers = enumerate(in_order(by_worker), 1)
    events: list[dict[str, Any]] = []
    for pid, name in workers:
        events.extend(_process(pid, name, by_worker[name], first))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": run, "producer": "siirl_dask"},
    }


def _process(
    pid: int,
    worker: str,
    spans: Sequence[TraceSpan],
    first: int,
) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", pid, 0, name=f"worker {worker!r}")
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for number, lane in enumerate(_ORDER):
        own = [span for span in spans if span.lane is lane]
        slices = [span for span in own if not span.is_count]
        if lane is Lane.ENGINE:
            slices = _engine_slices(own)
        for thread, apart in enumerate(_threads(slices)):
            tid = 1 + number * _THREADS + thread
            yield _metadata(
                "thread_name", pid, tid, name=f"{lane} {thread + 1}" if thread else str(lane)
            )
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            yield from (_slice(span, pid, tid, first) for span in apart)
        yield from _counters(own, pid, first)


def _metadata(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _slice(span: TraceSpan, pid: int, tid: int, first: int) -> dict[str, Any]:
    name = f"{span.name}, step {span.step}" if span.lane is Lane.CONTROL else span.name
    arguments = {
        "what": span.what,
        "step": span.step,
        "phase": span.phase,
        "iteration": span.sequence,
    }
    if span.amount is not None:
        words = {Lane.ENGINE: "requests", Lane.COMPUTE: "resident bytes"}
        arguments[words.get(span.lane, "bytes")] = span.amount
    times = {"ts": (span.start - first) / 1e3, "dur": span.duration / 1e3}
    return {
        "ph": "X",
        "name": name,
        "cat": str(span.lane),
        "pid": pid,
        "tid": tid,
        **times,
        "args": arguments,
    }


def _threads(spans: Sequence[TraceSpan]) -> list[list[TraceSpan]]:
    """Spread slices over threads, so that within each they nest or lie apart."""
    threads: list[list[TraceSpan]] = []
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.duration)):
        for apart, ends in zip(threads, open_ends, strict=True):
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                apart.append(span)
                ends.append(span.end)
                break
        else:
            if len(threads) < _THREADS:
                threads.append([span])
                open_ends.append([span.end])
    return threads


def _engine_slices(points: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Return a slice for each time in which the engine had requests under way, with the most
    that it had.
    """
    slices: list[TraceSpan] = []
    began: TraceSpan | None = None
    most = 0
    for point in points:
        if point.amount and began is None:
            began = point
            most = 0
        most = max(most, point.amount or 0)
        if not point.amount and began is not None:
            slices.append(
                began._replace(
                    what="busy",
                    name="engine",
                    duration=point.start - began.start,
                    amount=most,
                )
            )
            began = None
    return slices


def _counters(spans: Sequence[TraceSpan], pid: int, first: int) -> Iterator[dict[str, Any]]:
    """Yield the engine's requests as they are, and progress as things done a second."""
    requests = [span for span in spans if span.is_count and span.lane is Lane.ENGINE]
    for point in requests:
        yield _counter("engine: requests", pid, point.start - first, point.amount or 0)
    progress = [span for span in spans if span.is_count and span.name == "progress"]
    for before, point in pairwise(progress):
        seconds = max(1, point.start - before.start) / 1e9
        rate = ((point.amount or 0) - (before.amount or 0)) / seconds
        yield _counter("progress: things done a second", pid, before.start - first, max(0.0, rate))


def _counter(name: str, pid: int, at: int, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at / 1e3, "args": {"value": value}}
