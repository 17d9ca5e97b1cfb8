"""Runs a chain by matching over its links, with what a worker has built for it. Knows no role, no
algorithm, no engine and no Dask.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]  # Dask needs it
import pyarrow as pa

from siirl_dask.context import Device, Metric, Peers, Rank, Reduce
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.observe import STEP_SECONDS
from siirl_dask.planner import (
    Chain,
    Drop,
    Iteration,
    Lagged,
    Link,
    LoadPrompts,
    Node,
    Recv,
    ReportTable,
    Restore,
    RunNode,
    Save,
    SaveState,
    Send,
    Stream,
    reloaded_after,
)
from siirl_dask.tables import filled_by_group, once_per_group, read_stored_rows, step_folder
from siirl_dask.trace import Lane, record_transfers
from siirl_dask.worker import weight_stream
from siirl_dask.worker.early_work import FinishedRows
from siirl_dask.worker.lagged import (
    BackgroundPulls,
    PastIterations,
    WeightsInFlight,
    lagged_weights,
)
from siirl_dask.worker.monitoring.profiling import Profiling
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.node_call import NodeCalls
from siirl_dask.worker.packed_state import packed_state
from siirl_dask.worker.stages import PlainWriter, StageWriter
from siirl_dask.worker.stop import StopFlag, result_of
from siirl_dask.worker.weight_broadcast import Broadcast

_T = TypeVar("_T")
Meter = Callable[[str], AbstractContextManager[object]]
Digest = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRuntime:
    """One worker's built roles and connections, made once a run."""

    device: Device
    profiling: Profiling
    """Profiles nodes of some steps."""
    run_url: str
    run_seed: int
    skip_nonfinite: bool = False
    """``run.on_nan=skip``."""
    stages: StageWriter | PlainWriter
    """Writes the parts of tables that nodes save."""
    read_limit: int = 2 * 2**30
    """Bytes that stored rows of a step, or a row group of them, may take on a worker once
    decoded."""
    resources: Mapping[str, Any]
    """The object that each of this worker's roles built, by the role's name."""
    ranks: Mapping[str, Rank]
    """Rank of this worker in each of its roles."""
    peers: Mapping[str, Peers]
    """Collectives among the workers of each of its roles."""
    share_work: Callable[..., Any] | None
    """Offers a node's work items to idle peers; None where work stealing is off."""
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    """The event loop that the databuffer lives on; chains run in another thread."""
    stop: StopFlag
    meter: Meter
    """Times a link under its name on Dask's dashboard."""
    digest: Digest = lambda name, value, unit: None
    """Adds an amount of a unit to a link there, such as the bytes that it received."""
    stream_bytes: int
    """Largest table of a weight stream, unless one parameter is larger."""
    broadcasts: Mapping[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """Broadcasts by the workers that take part; a weight stream with one uses it."""
    overlap: bool = True
    """Whether nodes may begin with finished rows of a node above, see ``Plan.overlap``."""
    node_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of nodes that lasts from step to step (``Context.state``), by phase and name."""
    background_pulls: BackgroundPulls = field(default_factory=BackgroundPulls)
    """Rows of earlier iterations that nodes load while they run."""
    progress: TaskProgress = field(default_factory=TaskProgress)
    """Counts what gets done, holds the node whose function is running, and records in its ``trace`` how
    long each link takes."""


@dataclass(frozen=True, slots=True)
class ChainRun:
    """A worker's pass through its chain in one iteration."""

    calls: NodeCalls
    past_iterations: PastIterations

    def run(self, chain: Chain) -> dict[str, Metric]:
        """Run the chain's links in order and return the logged metrics. Aborted when the worker
        is told to stop.
        """
        runtime = self.calls.runtime
        traffic = runtime.databuffer.traffic
        before = traffic.snapshot()
        early = FinishedRows.of_chain(chain, runtime, self.calls.iteration)
        self.calls.early = early
        self.calls.reloaded = reloaded_after(chain)
        began = time.monotonic()
        try:
            self._run_links(chain.links)
        finally:
            early.cancel()
        context = self.calls.context("")
        received = traffic.since(before)
        context.log("bytes/peers", received.total, Reduce.SUM)
        context.log("bytes/hosts", received.between_hosts, Reduce.SUM)
        context.log("bytes/early", received.early, Reduce.SUM)
        context.log("bytes/process", _resident_memory(), Reduce.MAX)
        context.log(STEP_SECONDS, time.monotonic() - began, Reduce.MAX)
        record_transfers(
            runtime.progress.trace,
            received.by_worker,
            received.shared_by_worker,
            at=time.monotonic_ns(),
        )
        return self.calls.metrics

    def _run_links(self, links: Sequence[Link]) -> None:
        runtime = self.calls.runtime
        iteration = self.calls.iteration
        tables = self.calls.tables
        trace = runtime.progress.trace
        databuffer = runtime.databuffer
        for link in links:
            runtime.stop.check()
            runtime.progress.beat()
            match link:
                case LoadPrompts(name, columns, index, count):
                    assert self.calls.loader is not None
                    self.calls.prompts_link = link
                    with _timed(self.calls, name), trace.span(Lane.STORAGE, "read", name):
                        tables[name] = self.calls.loader.load(
                            iteration.batch, columns, index, count
                        )
                case Restore(node, table, schema, index, count, shared):
                    span = trace.span(Lane.STORAGE, "read", table)
                    with _timed(self.calls, node.name), span, self.calls.node_scope(node):
                        folder = step_folder(runtime.run_url, table, iteration.step)
                        rows = read_stored_rows(
                            folder, schema, index, count, runtime.read_limit, whole=bool(shared)
                        )
                        tables[node.name] = filled_by_group(rows, shared)
                case RunNode(node, inputs, columns):
                    with (
                        _timed(self.calls, node.name),
                        trace.span(Lane.COMPUTE, "node", node.name) as span,
                    ):
                        arriving = self._arriving_weights(node, links)
                        tables[node.name] = self.calls.call(node, inputs, columns, arriving)
                        if trace.enabled:
                            span.amount = _resident_memory()
                case Stream(edge=edge):
                    bytes_before = databuffer.traffic.total
                    weight_stream.run(link, self.calls)
                    if edge is not None:
                        self._show_bytes(edge.name, databuffer.traffic.total - bytes_before)
                case Send(edge):
                    with trace.span(
                        Lane.TRANSFER, "publish", edge.name, sequence=iteration.sequence
                    ):
                        publishing = databuffer.publish(edge, iteration, tables[edge.source])
                        self._result(asyncio.run_coroutine_threadsafe(publishing, runtime.loop))
                case Recv(edge):
                    with _timed(self.calls, edge.name):
                        tables[edge.name] = self._receive(link)
                case Save(node, table, shared=shared):
                    span = trace.span(Lane.STORAGE, "save", table)
                    with span, runtime.progress.at(f"the writing of table {table!r}, {iteration}"):
                        rows = once_per_group(tables[node], shared)
                        runtime.stages.save(link, iteration, rows, self.calls.step_progress())
                case SaveState(node, table):
                    if runtime.stages.reports:
                        with trace.span(Lane.STORAGE, "save", table):
                            rows = packed_state(self.calls, node)
                            runtime.stages.save(link, iteration, rows, self.calls.step_progress())
                case ReportTable(table):
                    runtime.stages.report_no_part(table, iteration, self.calls.step_progress())
                case Drop(table):
                    del tables[table]
                case Lagged(steps, inner):
                    for skipped in self.past_iterations.skipped(iteration, steps):
                        self._for_iteration(skipped)._discard(inner)
                        runtime.background_pulls.forget_run(skipped, link)
                    earlier = self.past_iterations.lagged(iteration, steps)
                    if earlier is None:
                        continue
                    if not runtime.background_pulls.has_run(earlier, link):
                        self._for_iteration(earlier)._run_links(inner)
                    runtime.background_pulls.forget_run(earlier, link)

    def _for_iteration(self, earlier: Iteration) -> ChainRun:
        """Return the same run with tables of its own, for links of an earlier iteration."""
        return replace(self, calls=replace(self.calls, iteration=earlier, tables={}))

    def _discard(self, links: Sequence[Link]) -> None:
        """Receive and discard all streams among ``links``: their sources wait until every table
        is acknowledged; and the rows that are on their way already.
        """
        for link in links:
            match link:
                case Stream():
                    weight_stream.discard(link, self.calls)
                case Recv(edge):
                    pulled = self.calls.runtime.background_pulls.take(self.calls.iteration, edge)
                    if pulled is not None:
                        self._result(pulled)

    def _arriving_weights(self, node: Node, links: Sequence[Link]) -> WeightsInFlight | None:
        """Return the weights that a node may load while it runs; None for one that does not."""
        if not node.contract.in_flight:
            return None
        link = lagged_weights(links, node.role)
        if link is None:
            return None
        pulls = self.calls.runtime.background_pulls
        earlier = self.past_iterations.earlier(self.calls.iteration, link.steps)
        waiting = [each for each in earlier if not pulls.has_run(each, link)]
        for each in waiting:
            for inner in link.links:
                if isinstance(inner, Recv):
                    pulls.begin(each, inner.edge, partial(self._pull, inner, each))
        return WeightsInFlight(
            link=link,
            waiting=waiting,
            pulls=pulls,
            run=lambda iteration: self._for_iteration(iteration)._run_links(link.links),
            metrics=self.calls.metrics,
        )

    def _pull(
        self,
        link: Recv,
        iteration: Iteration,
        on_owned: Callable[[], object] = lambda: None,
    ) -> Future[pa.Table]:
        """Begin to pull the rows of an edge, on the event loop."""
        runtime = self.calls.runtime
        pulling = runtime.databuffer.pull(
            link.edge,
            link.guide,
            iteration,
            on_owned=on_owned,
            already_here=[self.calls.tables[name] for name in link.have],
        )
        return asyncio.run_coroutine_threadsafe(pulling, runtime.loop)

    def _receive(self, link: Recv) -> pa.Table:
        """Return the edge's rows, which may be on their way already. The wait until they are made
        is recorded apart from their transfer.
        """
        edge = link.edge
        trace = self.calls.runtime.progress.trace
        databuffer = self.calls.runtime.databuffer
        iteration = self.calls.iteration
        bytes_before = databuffer.traffic.total
        owned_at: list[int] = []
        started = time.monotonic_ns()
        pulled = self.calls.runtime.background_pulls.take(iteration, edge)
        if pulled is None:
            pulled = self._pull(link, iteration, lambda: owned_at.append(time.monotonic_ns()))
        try:
            return self._result(pulled)
        finally:
            made_at = owned_at[0] if owned_at else time.monotonic_ns()
            nbytes = databuffer.traffic.total - bytes_before
            self._show_bytes(edge.name, nbytes)
            if edge.by_group:
                self.calls.context("").log("bytes/by_group", nbytes, Reduce.SUM)
            sequence = iteration.sequence
            trace.add(
                Lane.WAIT, "rows", edge.name, started, made_at, sequence=sequence, beside=False
            )
            trace.add(
                Lane.TRANSFER,
                "receive",
                edge.name,
                made_at,
                amount=nbytes,
                sequence=sequence,
                beside=False,
            )

    def _show_bytes(self, name: str, nbytes: int) -> None:
        """Add bytes that came from other workers to a link on Dask's dashboard; the task's own
        thread has the context that they belong to.
        """
        if nbytes:
            self.calls.runtime.digest(name, nbytes, "bytes")

    def _result(self, future: Future[_T]) -> _T:
        with self.calls.runtime.progress.waiting(""):
            return result_of(future, self.calls.runtime.stop)


@contextmanager
def _timed(calls: NodeCalls, name: str) -> Iterator[None]:
    """Log the seconds that a link takes, and show it by name on the dashboard."""
    started = time.perf_counter()
    try:
        with calls.runtime.meter(name):
            yield
    finally:
        metric = calls.metrics.setdefault(f"seconds/{name}", Metric(Reduce.MAX))
        metric.add(time.perf_counter() - started)


def _resident_memory() -> int:
    """Return the bytes of this process that are in memory, shared ones included."""
    resident: int = _process(os.getpid()).memory_info().rss
    return resident


@cache
def _process(pid: int) -> psutil.Process:
    """Return a process. It is cached, since psutil takes longer to make one than to ask it for
    its memory.
    """
    return psutil.Process(pid)
