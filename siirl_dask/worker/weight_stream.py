"""A table in parts: one node makes it, another takes it, and no worker of theirs ever holds all of it.

Part 0 is what ``Parts`` calls ``about``. Whoever gives makes a part when all who take have had the one four before it;
whoever takes asks for the next part and then works on the one that has come. Its node may still refer to the last row
of the part before that: three parts are there at most, and four that were made here. A worker that gives and takes
makes its own share of a part before it asks for all of it, so nobody waits for a part that nobody makes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count

import pyarrow as pa

from siirl_dask.context import Metric, Parts, Reduce
from siirl_dask.coordinator.databuffer import Databuffer
from siirl_dask.coordinator.messages import Turn
from siirl_dask.errors import NodeError
from siirl_dask.planner import Edge
from siirl_dask.schema import ROW_ID
from siirl_dask.worker.stop import StopFlag, finished, wait_for

_UNTAKEN = 4  # parts made here that somebody has yet to take; with 2 a hand-over took half as long again on busy cores


@dataclass(frozen=True, slots=True)
class Wire:
    """What goes along an edge in one turn, part by part, seen from a worker's own thread."""

    edge: Edge
    turn: Turn
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    stop: StopFlag

    def publish(self, part: int, table: pa.Table) -> None:
        wait_for(self.databuffer.publish(self.edge, self.turn, table, part), self.loop, self.stop)

    def wait_until_taken(self, part: int) -> None:
        wait_for(self.databuffer.until_taken(self.edge, self.turn, part), self.loop, self.stop)

    def ask_for(self, part: int) -> Future[pa.Table]:
        pulling = self.databuffer.pull(self.edge, self.edge, self.turn, part)
        return asyncio.run_coroutine_threadsafe(pulling, self.loop)

    def wait_for(self, coming: Future[pa.Table]) -> pa.Table:
        return finished(coming, self.stop)


class Clock:
    """Seconds under each name, without what goes on under another name meanwhile."""

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


def giving(made: Iterator[pa.Table], wire: Wire, clock: Clock) -> Iterator[None]:
    """Makes a part and publishes it, whenever it is asked to go on."""
    for part in count():
        with clock.running(wire.edge.name):
            if part >= _UNTAKEN:
                wire.wait_until_taken(part - _UNTAKEN)
        table = next(made, None)
        if table is None:
            return
        with clock.running(wire.edge.name):
            wire.publish(part, table)
        del table  # it is freed when it has been taken
        yield


def taking(wire: Wire, given: Iterator[None], clock: Clock) -> Parts:
    """What comes, as long as ``given`` goes on on this worker as well. NodeError for other rows than were announced."""

    def ask_for(part: int) -> Future[pa.Table]:
        next(given, None)
        return wire.ask_for(part)

    def wait_for(coming: Future[pa.Table]) -> pa.Table:
        with clock.running(wire.edge.name):
            return wire.wait_for(coming)

    about = wait_for(ask_for(0))
    return Parts(about, in_order(about, _following(about.num_rows, ask_for, wait_for), wire.edge.source))


def _following(
    left: int, ask_for: Callable[[int], Future[pa.Table]], wait_for: Callable[[Future[pa.Table]], pa.Table]
) -> Iterator[pa.Table]:
    """Part after part, until ``left`` rows have come or a part has none."""
    coming = ask_for(1) if left else None
    try:
        for part in count(2):
            if coming is None:
                return
            table = wait_for(coming)
            left -= table.num_rows
            coming = ask_for(part) if left > 0 and table.num_rows else None
            yield table
            del table
    finally:
        if coming is not None:
            coming.cancel()


def in_order(about: pa.Table, tables: Iterator[pa.Table], source: str) -> Generator[pa.Table]:
    """``tables``, when they are runs of the rows that are announced, up to the last. NodeError for others."""
    first = 0
    for table in tables:
        expected = about[ROW_ID].slice(first, table.num_rows)
        if not table.num_rows or not table[ROW_ID].equals(expected):
            raise NodeError(
                f"node {source!r} announced {about.num_rows} rows, and after {first} of them a part came with rows "
                f"{table[ROW_ID].slice(0, 5).to_pylist()}: expected those that follow, in order, in every part some"
            )
        first += table.num_rows
        yield table
        del table
    if first < about.num_rows:
        raise NodeError(f"node {source!r} announced {about.num_rows} rows and gave {first}")
