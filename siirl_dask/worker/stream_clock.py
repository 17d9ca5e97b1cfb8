"""Times of a weight stream's two nodes, which run at once."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from siirl_dask.context import Metric, Reduce
from siirl_dask.trace import Lane, Span
from siirl_dask.worker.node_call import NodeCalls


class StreamClock:
    """Sums the seconds spent under each name, and records them as spans of the trace. Time under
    an inner name does not count for the outer one.
    """

    def __init__(self, calls: NodeCalls) -> None:
        self._meter = calls.runtime.meter
        self._trace = calls.runtime.progress.trace
        self._sequence = calls.iteration.sequence
        self._seconds: dict[str, float] = {}
        self._inner_seconds = [0.0]
        """Seconds that inner names have taken, for each name that is being counted; the
        outermost first."""

    def running(self, name: str) -> AbstractContextManager[Span]:
        """Count the time inside under the name of a node."""
        return self._counted(name, self._trace.span(Lane.COMPUTE, "node", name))

    def moving(self, name: str, what: str) -> AbstractContextManager[Span]:
        """Count the time inside under the name of an edge."""
        span = self._trace.span(Lane.TRANSFER, what, name, sequence=self._sequence)
        return self._counted(name, span)

    @contextmanager
    def _counted(self, name: str, span: Span) -> Iterator[Span]:
        started = time.perf_counter()
        self._inner_seconds.append(0.0)
        try:
            with self._meter(name), span:
                yield span
        finally:
            passed = time.perf_counter() - started
            own = passed - self._inner_seconds.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + own
            self._inner_seconds[-1] += passed

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
