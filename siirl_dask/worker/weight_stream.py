"""Weight streams: one node gives a model's weights bit by bit, another takes them, and no worker holds them whole.

What travels is a sequence of tables. Table 0 is the stream's index: all rows, without their bytes. A source makes a
table when every sink has taken the one four before it; a sink asks for the next table and then works on the one that
has come. Its node may still refer to the last row of the table before that, so at most three tables are there on a
sink, and four that were made on a source. A worker that is both makes its own share of a table before it asks for all
of it, so nobody waits for a table that nobody makes.

Where a broadcast can bring the tensors from device to device, only the index travels as a table.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pyarrow as pa

from siirl_dask.context import Metric, Reduce, RowStream
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.errors import NodeError
from siirl_dask.planner import Edge, Iteration, Stream
from siirl_dask.schema import ROW_ID
from siirl_dask.worker.node_call import NodeCalls, checked
from siirl_dask.worker.stop import StopFlag, finished, wait_for
from siirl_dask.worker.weight_broadcast import Broadcast

_MAX_UNACKED = 4  # tables made here that a sink has yet to take; with 2 a stream took half as long again on busy cores


def run(link: Stream, calls: NodeCalls) -> None:
    """Have the link's source give its stream and its sink take it, each as far as it is on this worker."""
    runtime = calls.runtime
    clock, broadcast = Clock(runtime.meter), runtime.broadcasts.get(link.joins)
    made = _made(link, calls, tensors=broadcast is not None) if link.gives else iter(())
    made = clock.timed(link.source.name, made)
    if link.edge is None:
        index = next(made)
        _take(link, calls, RowStream(index, check_order(index, made, link.source.name)), clock)
    else:
        edge = StreamEdge(link.edge, calls.iteration, runtime.databuffer, runtime.loop, runtime.stop)
        if broadcast is not None:
            _broadcast(link, calls, made, edge, broadcast, clock)
        else:
            _relay(link, calls, made, edge, clock)
    clock.log(calls.metrics)


def _relay(link: Stream, calls: NodeCalls, made: Iterator[pa.Table], edge: StreamEdge, clock: Clock) -> None:
    """The tables go along the edge, as rows do."""
    produced = produce(made, edge, clock)
    if link.takes:
        _take(link, calls, consume(edge, produced, clock), clock)
    for _ in produced:
        calls.runtime.stop.check()


def _broadcast(
    link: Stream, calls: NodeCalls, made: Iterator[Any], edge: StreamEdge, broadcast: Broadcast, clock: Clock
) -> None:
    """The index goes along the edge, the tensors from device to device."""
    waiting = partial(clock.running, edge.edge.name)
    if link.gives:
        index = next(made)
        edge.publish(0, index)
        sent = broadcast.send(index, made, waiting)
        calls.context("").log("bytes/broadcast", sent, Reduce.SUM)
    else:
        with waiting():
            index = edge.wait_for(edge.ask_for(0))
        _take(link, calls, RowStream(index, broadcast.receive(index, waiting)), clock, tensors=True)


def _made(link: Stream, calls: NodeCalls, *, tensors: bool) -> Iterator[Any]:
    """The stream's index, which one worker of the source gives, and then this worker's share of each table; or, with
    ``tensors``, every tensor.
    """
    node, source = link.source, link.source.weight_source
    assert source is not None, "the planner makes a Stream only of a node that gives one"
    with calls.named(node):
        table, context = calls.joined(link.inputs), calls.context_of(node)
        if tensors:
            assert source.tensors is not None
            stream = source.tensors(context, table)
        else:
            stream = source.tables(context, table, max_bytes=calls.runtime.stream_bytes)
        if not isinstance(stream, RowStream):
            raise NodeError(f"node {node.name!r} gave a {type(stream).__name__}: expected a RowStream")
        index = checked(node, link.columns, table, stream.index)
        announces = link.edge is None or link.edge.sources[0] == calls.runtime.device.worker
        yield index if announces else index.slice(0, 0)
        for item in stream.tables:
            yield item if tensors else checked(node, link.columns, table, item)
            del item  # or it would be there while the next is made


def _take(link: Stream, calls: NodeCalls, stream: RowStream, clock: Clock, *, tensors: bool = False) -> None:
    """Have the sink take the stream. What its node leaves is let go of, since others wait for it to be taken."""
    node, sink = link.target, link.target.weight_sink
    assert sink is not None, "the planner makes a Stream only for a node that takes one"
    with calls.named(node), clock.running(node.name), closing(stream.tables):
        take = sink.tensors if tensors else sink.tables
        assert take is not None
        take(calls.context_of(node), stream)
        for _ in stream.tables:
            calls.runtime.stop.check()


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """An edge in one iteration, table by table, as a worker's own thread sees it."""

    edge: Edge
    iteration: Iteration
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    stop: StopFlag

    def publish(self, number: int, table: pa.Table) -> None:
        wait_for(self.databuffer.publish(self.edge, self.iteration, table, number), self.loop, self.stop)

    def wait_until_acked(self, number: int) -> None:
        wait_for(self.databuffer.wait_until_acked(self.edge, self.iteration, number), self.loop, self.stop)

    def ask_for(self, number: int) -> Future[pa.Table]:
        pulling = self.databuffer.pull(self.edge, self.edge, self.iteration, number)
        return asyncio.run_coroutine_threadsafe(pulling, self.loop)

    def wait_for(self, coming: Future[pa.Table]) -> pa.Table:
        return finished(coming, self.stop)


class Clock:
    """Seconds under each name, without those that pass under another name meanwhile."""

    def __init__(self, meter: Callable[[str], AbstractContextManager[object]]) -> None:
        self._meter = meter
        self._seconds: dict[str, float] = {}
        self._within = [0.0]

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self._within.append(0.0)
        try:
            with self._meter(name):
                yield
        finally:
            passed = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + passed - self._within.pop()
            self._within[-1] += passed

    def timed(self, name: str, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """``tables``, the making of each under ``name``."""
        while True:
            with self.running(name):
                table = next(tables, None)
            if table is None:
                return
            yield table
            del table

    def log(self, metrics: dict[str, Metric]) -> None:
        for name, seconds in self._seconds.items():
            metrics.setdefault(f"seconds/{name}", Metric(Reduce.MAX)).add(seconds)


def produce(made: Iterator[pa.Table], edge: StreamEdge, clock: Clock) -> Iterator[None]:
    """Makes and publishes one table each time it is advanced."""
    for number in count():
        with clock.running(edge.edge.name):
            if number >= _MAX_UNACKED:
                edge.wait_until_acked(number - _MAX_UNACKED)
        table = next(made, None)
        if table is None:
            return
        with clock.running(edge.edge.name):
            edge.publish(number, table)
        del table  # it is freed when it has been taken
        yield


def consume(edge: StreamEdge, produced: Iterator[None], clock: Clock) -> RowStream:
    """The stream that arrives. ``produced`` is advanced along with it, since this worker may be a source as well.

    NodeError when other rows arrive than the index announced.
    """

    def ask_for(number: int) -> Future[pa.Table]:
        next(produced, None)
        return edge.ask_for(number)

    def wait_for(coming: Future[pa.Table]) -> pa.Table:
        with clock.running(edge.edge.name):
            return edge.wait_for(coming)

    index = wait_for(ask_for(0))
    return RowStream(index, check_order(index, _following(index.num_rows, ask_for, wait_for), edge.edge.source))


def _following(
    rows: int, ask_for: Callable[[int], Future[pa.Table]], wait_for: Callable[[Future[pa.Table]], pa.Table]
) -> Iterator[pa.Table]:
    """Table after table, until ``rows`` rows have come or a table has none. The next is on its way meanwhile."""
    coming = ask_for(1) if rows else None
    try:
        for number in count(2):
            if coming is None:
                return
            table = wait_for(coming)
            rows -= table.num_rows
            coming = ask_for(number) if rows > 0 and table.num_rows else None
            yield table
            del table
    finally:
        if coming is not None:
            coming.cancel()


def check_order(index: pa.Table, tables: Iterator[pa.Table], source: str) -> Generator[pa.Table]:
    """``tables``, held against the index: consecutive rows of it, up to the last. NodeError for others."""
    first = 0
    for table in tables:
        expected = index[ROW_ID].slice(first, table.num_rows)
        if not table.num_rows or not table[ROW_ID].equals(expected):
            raise NodeError(
                f"node {source!r} announced {index.num_rows} rows, and after {first} of them a table came with rows "
                f"{table[ROW_ID].slice(0, 5).to_pylist()}: expected those that follow, in order, at least one a table"
            )
        first += table.num_rows
        yield table
        del table
    if first < index.num_rows:
        raise NodeError(f"node {source!r} announced {index.num_rows} rows and gave {first}")
