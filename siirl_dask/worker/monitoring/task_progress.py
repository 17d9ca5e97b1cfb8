"""A worker's progress goes with each heartbeat to the scheduler: how much was done, and where the
worker's task is.

A sample, a micro-batch, a rewarded row, a table of weights, a link of the chain: each is one beat.
A step may take any time as long as some worker makes progress; a stall is silence of all. The
scheduler imports this module: no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from siirl_dask.context import Device
from siirl_dask.trace import Lane, Recorder

NODE = "node "
"""Beginning of the name of a place that is in a node."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker's progress as the scheduler gets it."""

    beats: int = 0
    """Number of things that its tasks have got done."""
    place: str = ""
    """Where its task is; empty between tasks."""
    waits: bool = False
    """Whether it does nothing but wait for other workers."""
    sampled: int = 0
    """Samples or episodes that it has completed in the node that draws them."""
    to_sample: int = 0
    """Number of its own there."""

    @staticmethod
    def of(metrics: Mapping[str, Any], name: str) -> Reading:
        """Return the reading ``name`` of a worker's metrics in Dask; an empty one if it is
        missing or malformed.
        """
        match metrics.get(name):
            case [int(beats), str(place), bool(waits), int(sampled), int(to_sample)]:
                return Reading(beats, place[:200], waits, sampled=sampled, to_sample=to_sample)
        return Reading()


class TaskProgress:
    """Counts what gets done on a worker, from any thread, and records it in the trace."""

    def __init__(self, trace: Recorder | None = None) -> None:
        self.trace = Recorder(enabled=False) if trace is None else trace
        """Records waits, stages and beats."""
        self._numbers = count(1)
        self._beats = 0
        self._next: TaskProgress | None = None
        self._places: list[str] = []
        self.thread: int | None = None
        """Number of the thread that entered a place last: the task's."""
        self._waits = 0
        self._sampled = (0, 0)
        self.requests = 0
        """Requests that this worker's engine is processing."""
        self.waiting_requests = 0
        """Requests of these that wait for room in the engine's KV cache."""
        self.cache_used = 0.0
        """Share of the engine's KV cache that is in use."""
        self.read_at = time.monotonic()
        """Time of the last ``read``: Dask reads for each heartbeat, and sends none before the
        last one was answered."""

    def beat(self) -> None:
        """Count one thing that got done."""
        # one step of the interpreter: several threads may call it
        self._beats = next(self._numbers)
        self.trace.count(Lane.COMPUTE, "progress", self._beats)
        if self._next is not None:
            self._next.beat()

    @property
    def beats(self) -> int:
        """Number of beats so far."""
        return self._beats

    def forward_to(self, next_progress: TaskProgress) -> None:
        """Forward beats and waits to the next run's progress, since objects that report here are
        reused there.
        """
        self._next = next_progress

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Name the place where the worker's task is while inside; entering and leaving are
        beats.
        """
        self._places.append(place)
        self.thread = threading.get_ident()
        self.beat()
        try:
            yield
        finally:
            self._places.pop()
            self.beat()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name a part of the place where the task is, while inside."""
        with (
            self.at(f"{self.place}: {name}" if self.place else name),
            self.trace.span(Lane.COMPUTE, "stage", name),
        ):
            yield

    @contextmanager
    def waiting(self, what: str = "peers") -> Iterator[None]:
        """Mark the task, while inside, as waiting for other workers. ``what`` names the wait in the
        trace; an empty text where the caller records it.
        """
        if self._next is not None:
            with self._next.waiting(what):
                yield
            return
        self._waits += 1
        try:
            if what:
                with self.trace.span(Lane.WAIT, what):
                    yield
            else:
                yield
        finally:
            self._waits -= 1
            self.beat()

    def sampled(self, done: int, total: int) -> None:
        """Set how many samples or episodes of a node this worker has completed, and the number of
        its own.
        """
        self._sampled = (done, total)

    def engine_has(self, requests: int) -> None:
        """Set the number of requests that this worker's engine is processing."""
        self.requests = requests
        self.trace.count(Lane.ENGINE, "requests", requests)

    def engine_cache(self, used: float, waiting: int) -> None:
        """Set the used share of the engine's KV cache, and the number of requests that wait for
        room in it.
        """
        self.cache_used = used
        self.waiting_requests = waiting

    def with_callbacks(self, device: Device) -> Device:
        """Return the device with the callables by which roles and nodes report to this progress."""
        return replace(
            device,
            progress=self.beat,
            stage=self.stage,
            waiting=self.waiting,
            engine_has=self.engine_has,
            engine_cache=self.engine_cache,
            sampled=self.sampled,
        )

    @property
    def place(self) -> str:
        """Where the worker's task is; empty between tasks."""
        innermost = self._places[-1:]  # a copy, since another thread may leave the place meanwhile
        return innermost[0] if innermost else ""

    @property
    def waits(self) -> bool:
        """Whether the task does nothing but wait for other workers."""
        return self._waits > 0

    def read(self) -> list[Any]:
        """Return the reading as plain data, for a heartbeat."""
        self.read_at = time.monotonic()
        return [self._beats, self.place, self.waits, *self._sampled]
