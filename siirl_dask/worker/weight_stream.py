"""Weight streams: a source node yields a model's weights table by table to a sink node; no worker holds all of them.

A stream is a sequence of tables. Table 0 is its index: all rows, without their bytes. A source makes a table once every
sink has acknowledged the one four before it, so it holds at most four. A sink requests the next table and then works on
the one that arrived; its node may still refer to the last row of the table before, so it holds at most three. A worker
that is both source and sink makes its own share of a table before it requests all of it, so nobody waits for a table
that nobody makes.

Where a broadcast can bring the tensors from device to device, only the index travels as a table. Where each worker is
both, nothing travels: its sink gets the tensors that its source has gathered, on their device.
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
from siirl_dask.planner.weight_streams import handle_tensors
from siirl_dask.schema import ROW_ID
from siirl_dask.trace import Lane, Recorder, Span
from siirl_dask.worker.node_call import NodeCalls, checked
from siirl_dask.worker.pulse import Pulse
from siirl_dask.worker.stop import StopFlag, finished, wait_for
from siirl_dask.worker.weight_broadcast import Broadcast

_MAX_UNACKED = 4  # tables that a source holds; with 2 a stream took half as long again on busy cores


def run(link: Stream, calls: NodeCalls) -> None:
    """Run the source and the sink of a stream, as far as they are on this worker."""
    runtime = calls.runtime
    clock, broadcast = _clock(calls), runtime.broadcasts.get(link.joins)
    tensors = broadcast is not None or (link.edge is None and handle_tensors(link.source, link.target))
    made = _made(link, calls, tensors=tensors) if link.gives else iter(())
    made = clock.timed(link.source.name, made)
    if link.edge is None:
        index = next(made)
        stream = RowStream(index, made if tensors else check_order(index, made, link.source.name))
        _take(link, calls, stream, clock, tensors=tensors)
    elif broadcast is not None:
        _broadcast(link, calls, made, _edge(link.edge, calls), broadcast, clock)
    else:
        _relay(link, calls, made, _edge(link.edge, calls), clock)
    clock.log(calls.metrics)


def discard(link: Stream, calls: NodeCalls) -> None:
    """Take all of a stream that comes from other workers, and leave it."""
    assert link.edge is not None, "what is of an earlier iteration comes from other workers"
    clock, edge = _clock(calls), _edge(link.edge, calls)
    broadcast = calls.runtime.broadcasts.get(link.joins)
    stream = consume(edge, iter(()), clock) if broadcast is None else _arriving(edge, broadcast, clock)
    for _ in stream.tables:
        calls.runtime.stop.check()


def _clock(calls: NodeCalls) -> Clock:
    return Clock(calls.runtime.meter, calls.runtime.trace, calls.iteration.sequence)


def _edge(edge: Edge, calls: NodeCalls) -> StreamEdge:
    runtime = calls.runtime
    return StreamEdge(edge, calls.iteration, runtime.databuffer, runtime.loop, runtime.stop, runtime.pulse)


def _relay(link: Stream, calls: NodeCalls, made: Iterator[pa.Table], edge: StreamEdge, clock: Clock) -> None:
    """Send the tables along the edge, as other rows."""
    produced = produce(made, edge, clock)
    if link.takes:
        _take(link, calls, consume(edge, produced, clock), clock)
    for _ in produced:
        calls.runtime.stop.check()


def _broadcast(
    link: Stream, calls: NodeCalls, made: Iterator[Any], edge: StreamEdge, broadcast: Broadcast, clock: Clock
) -> None:
    """Send the index along the edge, and the tensors from device to device."""
    if link.gives:
        index = next(made)
        edge.publish(0, index)
        sent = broadcast.send(index, made, partial(_waiting, edge, clock))
        calls.context("").log("bytes/broadcast", sent, Reduce.SUM)
    else:
        _take(link, calls, _arriving(edge, broadcast, clock), clock, tensors=True)


def _arriving(edge: StreamEdge, broadcast: Broadcast, clock: Clock) -> RowStream:
    """Return the stream that a broadcast brings, whose index comes along the edge."""
    with _waiting(edge, clock):
        index = edge.wait_for(edge.ask_for(0))
    return RowStream(index, broadcast.receive(index, partial(_waiting, edge, clock)))


@contextmanager
def _waiting(edge: StreamEdge, clock: Clock) -> Iterator[None]:
    with clock.moving(edge.edge.name), edge.pulse.waiting("weights"):
        yield


def _made(link: Stream, calls: NodeCalls, *, tensors: bool) -> Iterator[Any]:
    """Yield the stream's index and then this worker's share of each table; with ``tensors``, every tensor.

    The source's first worker announces the index; the others' index is empty.
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
            calls.runtime.pulse.beat()
            del item  # else it would live while the next one is made


def _take(link: Stream, calls: NodeCalls, stream: RowStream, clock: Clock, *, tensors: bool = False) -> None:
    """Run the sink on the stream. Tables that its node leaves are discarded, since sources wait for their acks."""
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
    """Publishes and pulls the tables of an edge in one iteration, from a worker's own thread."""

    edge: Edge
    iteration: Iteration
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    stop: StopFlag
    pulse: Pulse

    def publish(self, number: int, table: pa.Table) -> None:
        """Publish table ``number`` of the stream."""
        wait_for(self.databuffer.publish(self.edge, self.iteration, table, number), self.loop, self.stop)
        self.pulse.beat()

    def wait_until_acked(self, number: int) -> None:
        """Wait until every sink has acknowledged table ``number``."""
        with self.pulse.waiting("acks"):
            wait_for(self.databuffer.wait_until_acked(self.edge, self.iteration, number), self.loop, self.stop)

    def ask_for(self, number: int) -> Future[pa.Table]:
        """Begin to pull table ``number``."""
        pulling = self.databuffer.pull(self.edge, self.edge, self.iteration, number)
        return asyncio.run_coroutine_threadsafe(pulling, self.loop)

    def wait_for(self, coming: Future[pa.Table]) -> pa.Table:
        """Return a table that was asked for. Aborted when the worker is told to stop."""
        with self.pulse.waiting("weights"):
            return finished(coming, self.stop)


class Clock:
    """Sums seconds by name; time under an inner name does not count for the outer one. All of them are recorded."""

    def __init__(
        self, meter: Callable[[str], AbstractContextManager[object]], trace: Recorder | None = None, sequence: int = 0
    ) -> None:
        self._meter, self._sequence = meter, sequence
        self._trace = trace or Recorder(enabled=False)
        self._seconds: dict[str, float] = {}
        self._within = [0.0]

    def running(self, name: str) -> AbstractContextManager[Span]:
        """Count the time inside under the name of a node."""
        return self._counted(name, self._trace.span(Lane.COMPUTE, "node", name))

    def moving(self, name: str, what: str = "weights") -> AbstractContextManager[Span]:
        """Count the time inside under the name of an edge."""
        return self._counted(name, self._trace.span(Lane.TRANSFER, what, name, sequence=self._sequence))

    @contextmanager
    def _counted(self, name: str, span: Span) -> Iterator[Span]:
        started = time.perf_counter()
        self._within.append(0.0)
        try:
            with self._meter(name), span:
                yield span
        finally:
            passed = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + passed - self._within.pop()
            self._within[-1] += passed

    def timed(self, name: str, tables: Iterator[Any]) -> Generator[Any]:
        """Yield ``tables``, counting the time that each takes to make under ``name``."""
        while True:
            with self.running(name):
                table = next(tables, None)
            if table is None:
                return
            yield table
            del table

    def log(self, metrics: dict[str, Metric]) -> None:
        """Add the seconds to ``metrics`` as ``seconds/NAME``."""
        for name, seconds in self._seconds.items():
            metrics.setdefault(f"seconds/{name}", Metric(Reduce.MAX)).add(seconds)


def produce(made: Iterator[pa.Table], edge: StreamEdge, clock: Clock) -> Iterator[None]:
    """Make and publish one table each time the iterator is advanced."""
    for number in count():
        with clock.moving(edge.edge.name):
            if number >= _MAX_UNACKED:
                edge.wait_until_acked(number - _MAX_UNACKED)
        table = next(made, None)
        if table is None:
            return
        with clock.moving(edge.edge.name, "publish") as sent:
            sent.amount = table.nbytes
            edge.publish(number, table)
        del table  # it is freed once it is acknowledged
        yield


def consume(edge: StreamEdge, produced: Iterator[None], clock: Clock) -> RowStream:
    """Return the arriving stream. ``produced`` is advanced with it, since this worker may be a source as well.

    NodeError when other rows arrive than the index announced.
    """

    def ask_for(number: int) -> Future[pa.Table]:
        next(produced, None)
        return edge.ask_for(number)

    def wait_for(coming: Future[pa.Table]) -> pa.Table:
        with clock.moving(edge.edge.name) as received:
            table = edge.wait_for(coming)
            received.amount = table.nbytes
            return table

    index = wait_for(ask_for(0))
    return RowStream(index, check_order(index, _following(index.num_rows, ask_for, wait_for), edge.edge.source))


def _following(
    rows: int, ask_for: Callable[[int], Future[pa.Table]], wait_for: Callable[[Future[pa.Table]], pa.Table]
) -> Iterator[pa.Table]:
    """Yield tables until ``rows`` rows have come or a table is empty; the next one is on its way meanwhile."""
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
    """Yield ``tables``. NodeError unless they hold consecutive rows of ``index``, up to the last."""
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
