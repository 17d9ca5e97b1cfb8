"""Weight streams: a source node yields a model's weights table by table to a sink node; no worker
holds all of them.

A stream is a sequence of tables. Table 0 is its index: all rows, without their bytes. A source
makes a table once every sink has acknowledged the one four before it, so it holds at most four. A
sink requests the next table and then works on the one that arrived; its node may still refer to the
last row of the table before, so it holds at most three. A worker that is both source and sink makes
its own share of a table before it requests all of it, so nobody waits for a table that nobody
makes.

Where tensors can be broadcast from device to device, only the index is sent as a table. Where each
worker is both source and sink, nothing is sent: its sink gets the tensors that its source has
gathered, on their device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pyarrow as pa

from siirl_dask.context import Reduce, RowStream
from siirl_dask.errors import NodeError
from siirl_dask.planner import Edge, Stream
from siirl_dask.planner.weight_streams import handle_tensors
from siirl_dask.schema import ROW_ID
from siirl_dask.trace import Span
from siirl_dask.worker.node_call import NodeCalls
from siirl_dask.worker.node_output import checked
from siirl_dask.worker.stop import result_of, wait_for
from siirl_dask.worker.stream_clock import StreamClock
from siirl_dask.worker.weight_broadcast import Broadcast

# tables that a source holds; with 2 a stream took half as long again on busy cores
_MAX_UNACKED = 4


def run(link: Stream, calls: NodeCalls) -> None:
    """Run the source and the sink of a stream, as far as they are on this worker."""
    runtime = calls.runtime
    clock = StreamClock(calls)
    broadcast = runtime.broadcasts.get(link.joins)
    as_tensors = broadcast is not None
    if link.edge is None and handle_tensors(link.source, link.target):
        as_tensors = True
    produced: Iterator[Any] = iter(())
    if link.gives:
        produced = _run_source(link, calls, as_tensors=as_tensors)
    produced = clock.timed(link.source.name, produced)
    if link.edge is None:
        index = next(produced)
        items = produced if as_tensors else check_order(index, produced, link.source.name)
        stream = RowStream(index, items)
        _run_sink(link, calls, stream, clock, as_tensors=as_tensors)
    elif broadcast is not None:
        edge = StreamEdge(link.edge, calls, clock)
        if link.gives:
            index = next(produced)
            edge.publish(0, index)
            sent = broadcast.send(index, produced, edge.waiting)
            calls.context("").log("bytes/broadcast", sent, Reduce.SUM)
        else:
            stream = _receive_broadcast(edge, broadcast)
            _run_sink(link, calls, stream, clock, as_tensors=True)
    else:
        edge = StreamEdge(link.edge, calls, clock)
        published = publish_each(produced, edge)
        if link.takes:
            stream = receive_tables(edge, published)
            _run_sink(link, calls, stream, clock, as_tensors=False)
        for _ in published:
            runtime.stop.check()
    clock.log(calls.metrics)


def discard(link: Stream, calls: NodeCalls) -> None:
    """Receive and discard all of a stream that other workers send."""
    assert link.edge is not None, "a stream of an earlier iteration is sent by other workers"
    edge = StreamEdge(link.edge, calls, StreamClock(calls))
    broadcast = calls.runtime.broadcasts.get(link.joins)
    if broadcast is None:
        _receive_rest(receive_tables(edge, iter(())), calls)
    else:
        _receive_rest(_receive_broadcast(edge, broadcast), calls)


def _receive_rest(stream: RowStream, calls: NodeCalls) -> None:
    """Receive and drop the tables of a stream that are left: its sources wait for their acks."""
    for _ in stream.tables:
        calls.runtime.stop.check()


def _receive_broadcast(edge: StreamEdge, broadcast: Broadcast) -> RowStream:
    """Return a stream whose index travels along the edge and whose tensors are broadcast."""
    with edge.waiting():
        index = edge.wait_for(edge.request(0))
    return RowStream(index, broadcast.receive(index, edge.waiting))


def _run_source(link: Stream, calls: NodeCalls, *, as_tensors: bool) -> Iterator[Any]:
    """Yield the stream's index, then this worker's share of each table; with ``as_tensors``, then
    every tensor.

    The source's first worker announces the index; the others' index is empty.
    """
    node = link.source
    source = node.weight_source
    assert source is not None, "the planner makes a Stream only of a node that gives one"
    with calls.node_scope(node):
        table = calls.join_inputs(link.inputs)
        context = calls.node_context(node)
        if as_tensors:
            assert source.tensors is not None
            stream = source.tensors(context, table)
        else:
            stream = source.tables(context, table, max_bytes=calls.runtime.stream_bytes)
        if not isinstance(stream, RowStream):
            raise NodeError(
                f"node {node.name!r} gave a {type(stream).__name__}: expected a RowStream"
            )
        index = checked(node, link.columns, table, stream.index)
        if link.edge is not None and link.edge.sources[0] != calls.runtime.device.worker:
            index = index.slice(0, 0)
        yield index
        for item in stream.tables:
            yield item if as_tensors else checked(node, link.columns, table, item)
            calls.runtime.progress.beat()
            del item  # else it would live while the next one is made


def _run_sink(
    link: Stream,
    calls: NodeCalls,
    stream: RowStream,
    clock: StreamClock,
    *,
    as_tensors: bool,
) -> None:
    """Run the sink on the stream. Tables that its node leaves are discarded, since sources wait
    for their acks.
    """
    node = link.target
    sink = node.weight_sink
    assert sink is not None, "the planner makes a Stream only for a node that takes one"
    with calls.node_scope(node), clock.running(node.name), closing(stream.tables):
        load = sink.tensors if as_tensors else sink.tables
        assert load is not None
        load(calls.node_context(node), stream)
        _receive_rest(stream, calls)


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """Publishes and pulls the tables of an edge in one iteration, from a worker's own thread."""

    edge: Edge
    calls: NodeCalls
    clock: StreamClock

    def publish(self, number: int, table: pa.Table) -> None:
        """Publish table ``number`` of the stream."""
        runtime = self.calls.runtime
        publishing = runtime.databuffer.publish(self.edge, self.calls.iteration, table, number)
        wait_for(publishing, runtime.loop, runtime.stop)
        runtime.progress.beat()

    def wait_until_acked(self, number: int) -> None:
        """Wait until every sink has acknowledged table ``number``."""
        runtime = self.calls.runtime
        with runtime.progress.waiting("acks"):
            acked = runtime.databuffer.wait_until_acked(self.edge, self.calls.iteration, number)
            wait_for(acked, runtime.loop, runtime.stop)

    def request(self, number: int) -> Future[pa.Table]:
        """Begin to pull table ``number``."""
        runtime = self.calls.runtime
        pulling = runtime.databuffer.pull(self.edge, self.edge, self.calls.iteration, number)
        return asyncio.run_coroutine_threadsafe(pulling, runtime.loop)

    def wait_for(self, requested: Future[pa.Table]) -> pa.Table:
        """Return a table that was requested. Aborted when the worker is told to stop."""
        with self.calls.runtime.progress.waiting("weights"):
            return result_of(requested, self.calls.runtime.stop)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as a wait for weights."""
        with self.moving(), self.calls.runtime.progress.waiting("weights"):
            yield

    def moving(self, what: str = "weights") -> AbstractContextManager[Span]:
        """Count the time inside under the edge's name."""
        return self.clock.moving(self.edge.name, what)


def publish_each(tables: Iterator[pa.Table], edge: StreamEdge) -> Iterator[None]:
    """Make and publish one table each time the iterator is advanced."""
    for number in count():
        with edge.moving():
            if number >= _MAX_UNACKED:
                edge.wait_until_acked(number - _MAX_UNACKED)
        table = next(tables, None)
        if table is None:
            return
        with edge.moving("publish") as span:
            span.amount = table.nbytes
            edge.publish(number, table)
        del table  # it is freed once it is acknowledged
        yield


def receive_tables(edge: StreamEdge, published: Iterator[None]) -> RowStream:
    """Return the arriving stream. ``published`` is advanced with it, since this worker may be a
    source as well.

    NodeError when other rows arrive than the index announced.
    """

    def request(number: int) -> Future[pa.Table]:
        next(published, None)
        return edge.request(number)

    def wait_for(requested: Future[pa.Table]) -> pa.Table:
        with edge.moving() as span:
            table = edge.wait_for(requested)
            span.amount = table.nbytes
            return table

    index = wait_for(request(0))
    tables = _tables_after_index(index.num_rows, request, wait_for)
    return RowStream(index, check_order(index, tables, edge.edge.source))


def _tables_after_index(
    rows: int,
    request: Callable[[int], Future[pa.Table]],
    wait_for: Callable[[Future[pa.Table]], pa.Table],
) -> Iterator[pa.Table]:
    """Yield tables until ``rows`` rows have arrived or a table is empty; the next one is
    requested ahead.
    """
    requested = request(1) if rows else None
    try:
        for number in count(2):
            if requested is None:
                return
            table = wait_for(requested)
            rows -= table.num_rows
            requested = request(number) if rows > 0 and table.num_rows else None
            yield table
            del table
    finally:
        if requested is not None:
            requested.cancel()


def check_order(index: pa.Table, tables: Iterator[pa.Table], source: str) -> Generator[pa.Table]:
    """Yield ``tables``. NodeError unless they hold consecutive rows of ``index``, up to the
    last.
    """
    first = 0
    for table in tables:
        expected = index[ROW_ID].slice(first, table.num_rows)
        if not table.num_rows or not table[ROW_ID].equals(expected):
            raise NodeError(
                f"node {source!r} announced {index.num_rows} rows, and after {first} of them a "
                f"table came with rows {table[ROW_ID].slice(0, 5).to_pylist()}: expected those "
                "that follow, in order, at least one a table"
            )
        first += table.num_rows
        yield table
        del table
    if first < index.num_rows:
        raise NodeError(f"node {source!r} announced {index.num_rows} rows and gave {first}")
