"""Runs a chain by matching over its links. Knows no role, no algorithm, no engine and no Dask."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]  # Dask needs it
import pyarrow as pa

from siirl_dask.context import Metric, Reduce
from siirl_dask.coordinator.blobs import filled_by_group, once_per_group
from siirl_dask.coordinator.stored_rows import read_stored_rows, step_folder
from siirl_dask.observe.transfers import record_transfers
from siirl_dask.planner import (
    Chain,
    Drop,
    Edge,
    Iteration,
    Keep,
    Lagged,
    Link,
    Load,
    Recv,
    Report,
    Restore,
    Run,
    Save,
    Send,
    Stream,
)
from siirl_dask.planner.reloads import reloaded_after
from siirl_dask.trace import Lane, Span
from siirl_dask.worker import weight_stream
from siirl_dask.worker.lag import LagWindow
from siirl_dask.worker.node_call import NodeCalls
from siirl_dask.worker.stop import wait_for

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChainRun:
    """A worker's pass through its chain in one iteration."""

    calls: NodeCalls
    lag_window: LagWindow

    def run(self, chain: Chain) -> dict[str, Metric]:
        """Follow the chain's links and return the logged metrics. Aborted when the worker is told to stop."""
        traffic, context = self.calls.runtime.databuffer.traffic, self.calls.context("")
        peers, hosts, early = traffic.total, traffic.between_hosts, traffic.early
        sources, shared = dict(traffic.by_worker), dict(traffic.shared_by_worker)
        self._begin_early(chain)
        self.calls.reloaded = reloaded_after(chain)
        try:
            self._follow(chain.links)
        finally:
            self.calls.cancel_begun()
        context.log("bytes/peers", traffic.total - peers, Reduce.SUM)
        context.log("bytes/hosts", traffic.between_hosts - hosts, Reduce.SUM)
        context.log("bytes/early", traffic.early - early, Reduce.SUM)
        context.log("bytes/process", _resident_memory(), Reduce.MAX)
        came = sources, traffic.by_worker, (shared, traffic.shared_by_worker)
        record_transfers(self.calls.runtime.trace, *came, time.monotonic_ns())
        return self.calls.metrics

    def _begin_early(self, chain: Chain) -> None:
        """Begin to take rows that their sources hand over, and let this worker's nodes hand over theirs."""
        runtime = self.calls.runtime
        databuffer, handing, beginning = runtime.databuffer, dict[str, list[Edge]](), dict[str, list[Run]]()
        for link in chain.flat:
            if isinstance(link, Send) and link.edge.early and databuffer.leaves_early(link.edge):
                handing.setdefault(link.edge.early.node, []).append(link.edge)
            if isinstance(link, Run) and link.early:
                beginning.setdefault(link.early.node, []).append(link)
        self.calls.handing, self.calls.beginning = handing, beginning
        if coming := [link.edge for link in chain.flat if isinstance(link, Recv) and link.edge.early]:
            runtime.loop.call_soon_threadsafe(databuffer.prefetch, coming, self.calls.iteration)

    def _follow(self, links: Sequence[Link]) -> None:
        runtime, iteration, tables = self.calls.runtime, self.calls.iteration, self.calls.tables
        databuffer = runtime.databuffer
        for link in links:
            runtime.stop.check()
            runtime.pulse.beat()
            match link:
                case Load(name, columns, index, count):
                    assert self.calls.loader is not None
                    self.calls.loaded = link
                    with _Timed(self.calls, name), runtime.trace.span(Lane.STORAGE, "read", name):
                        tables[name] = self.calls.loader.load(iteration.batch, columns, index, count)
                case Restore(node, table, schema, index, count, shared):
                    reading = runtime.trace.span(Lane.STORAGE, "read", table)
                    with _Timed(self.calls, node.name), reading, self.calls.named(node):
                        folder = step_folder(runtime.run_url, table, iteration.step)
                        rows = read_stored_rows(folder, schema, index, count, runtime.read_limit, whole=bool(shared))
                        tables[node.name] = filled_by_group(rows, shared)
                case Run(node, inputs, columns):
                    with _Timed(self.calls, node.name), runtime.trace.span(Lane.COMPUTE, "node", node.name) as span:
                        tables[node.name] = self.calls.call(node, inputs, columns)
                        span.amount = _resident_memory() if runtime.trace.enabled else None
                case Stream():
                    weight_stream.run(link, self.calls)
                case Send(edge):
                    with self._moving(edge, "publish"):
                        self._wait(databuffer.publish(edge, iteration, tables[edge.source]))
                case Recv(edge, guide, have):
                    with _Timed(self.calls, edge.name):
                        tables[edge.name] = self._receive(edge, guide, [tables[name] for name in have])
                case Save(node, table, shared=shared):
                    writing = runtime.trace.span(Lane.STORAGE, "save", table)
                    with writing, runtime.pulse.at(f"the writing of table {table!r}, {iteration}"):
                        rows = once_per_group(tables[node], shared)
                        runtime.stages.save(link, iteration, rows, self.calls.so_far())
                case Keep(node, table):
                    if runtime.stages.reports:
                        with runtime.trace.span(Lane.STORAGE, "save", table):
                            runtime.stages.save(link, iteration, self.calls.kept(node), self.calls.so_far())
                case Report(table):
                    runtime.stages.note(table, iteration, self.calls.so_far())
                case Drop(table):
                    del tables[table]
                case Lagged(steps, inner):
                    for skipped in self.lag_window.skipped(iteration, steps):
                        self._in(skipped)._discard_streams(inner)
                    if (earlier := self.lag_window.lagged(iteration, steps)) is not None:
                        self._in(earlier)._follow(inner)

    def _in(self, earlier: Iteration) -> ChainRun:
        """Return the same run, with the links of an earlier iteration to come."""
        return replace(self, calls=replace(self.calls, iteration=earlier, tables={}))

    def _discard_streams(self, links: Sequence[Link]) -> None:
        """Take what streams bring and leave it: their sources wait until it is taken."""
        for link in links:
            if isinstance(link, Stream):
                weight_stream.discard(link, self.calls)

    def _receive(self, edge: Edge, guide: Edge, have: Sequence[pa.Table]) -> pa.Table:
        """Pull the edge's rows; the wait until they are made is recorded apart from their transfer."""
        runtime, iteration = self.calls.runtime, self.calls.iteration
        trace, traffic, owned = runtime.trace, runtime.databuffer.traffic, list[int]()
        began, before = time.monotonic_ns(), traffic.total
        pulling = runtime.databuffer.pull(
            edge, guide, iteration, on_owned=lambda: owned.append(time.monotonic_ns()), already_here=have
        )
        try:
            return self._wait(pulling)
        finally:
            made = owned[0] if owned else time.monotonic_ns()
            number, moved = iteration.sequence, traffic.total - before
            if edge.by_group:
                self.calls.context("").log("bytes/by_group", moved, Reduce.SUM)
            trace.add(Lane.WAIT, "rows", edge.name, began, made, sequence=number, beside=False)
            trace.add(Lane.TRANSFER, "receive", edge.name, made, amount=moved, sequence=number, beside=False)

    def _moving(self, edge: Edge, what: str) -> Span:
        return self.calls.runtime.trace.span(Lane.TRANSFER, what, edge.name, sequence=self.calls.iteration.sequence)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        with self.calls.runtime.pulse.waiting(""):
            return wait_for(work, self.calls.runtime.loop, self.calls.runtime.stop)


class _Timed:
    """Logs the seconds that a link takes and shows it by name on the dashboard."""

    def __init__(self, calls: NodeCalls, name: str) -> None:
        self._metrics = calls.metrics
        self._name = name
        self._meter = calls.runtime.meter(name)

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._meter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)
        metric = self._metrics.setdefault(f"seconds/{self._name}", Metric(Reduce.MAX))
        metric.add(time.perf_counter() - self._started)


def _resident_memory() -> int:
    """Return the bytes of this process that are in memory, shared ones included."""
    resident: int = _process(os.getpid()).memory_info().rss
    return resident


@cache
def _process(number: int) -> psutil.Process:
    """Return a process, which psutil looks up in the system when it is made: that takes longer than to ask it."""
    return psutil.Process(number)
