"""A worker's pulse goes with each heartbeat to the scheduler: whether anything gets done, and where the worker is.

A sample, a micro-batch, a rewarded row, a piece of weights, a link of the chain: each is one beat. A step may take any
time as long as something gets done on some worker; a stall is silence of all. The scheduler imports this module: no
torch.
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
"""How the name of a place begins that is in a node."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker's pulse as the scheduler gets it."""

    beats: int = 0
    place: str = ""
    """Where its task is; empty between tasks."""
    waits: bool = False
    """Whether it does nothing but wait for other workers."""

    @staticmethod
    def of(metrics: Mapping[str, Any], name: str) -> Reading:
        """Return the reading among a worker's metrics; an empty one where there is none yet, or no reading."""
        match metrics.get(name):
            case [int(beats), str(place), bool(waits)]:
                return Reading(beats, place[:200], waits)
        return Reading()


class Pulse:
    """Counts what gets done on a worker, from any thread, and has it recorded."""

    def __init__(self, trace: Recorder | None = None) -> None:
        self.trace = trace or Recorder(enabled=False)
        """Records waits, stages and beats."""
        self._next = count(1)
        self._beats = 0
        self._later: Pulse | None = None
        self._places: list[str] = []
        self.thread: int | None = None
        """Number of the thread that entered a place last: the task's."""
        self._waits = 0
        self.requests = 0
        """Requests that this worker's engine has under way."""
        self.waiting_requests = 0
        """Requests of these that wait for room in the engine's KV cache."""
        self.cache_used = 0.0
        """Share of the engine's KV cache that is in use."""
        self.read_at = time.monotonic()
        """When it was read last: Dask reads it for each heartbeat, and sends none before the last one was answered."""

    def beat(self) -> None:
        """Note that something got done."""
        self._beats = next(self._next)  # one step of the interpreter: several threads may call it
        self.trace.count(Lane.COMPUTE, "progress", self._beats)
        if self._later is not None:
            self._later.beat()

    @property
    def beats(self) -> int:
        """Number of beats so far."""
        return self._beats

    def pass_on(self, later: Pulse) -> None:
        """Count for ``later`` as well, and wait for it alone: objects that were built with this pulse go on in another
        run.
        """
        self._later = later

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Name the place where the worker's task is while inside; entering and leaving are beats."""
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
        with self.at(f"{self.place}: {name}" if self.place else name), self.trace.span(Lane.COMPUTE, "stage", name):
            yield

    @contextmanager
    def waiting(self, what: str = "peers") -> Iterator[None]:
        """Say, while inside, that the task waits for other workers; ``what`` for, or nothing where others record it."""
        if self._later is not None:
            with self._later.waiting(what):
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

    def engine_has(self, requests: int) -> None:
        """Note how many requests this worker's engine has under way."""
        self.requests = requests
        self.trace.count(Lane.ENGINE, "requests", requests)

    def engine_cache(self, used: float, waiting: int) -> None:
        """Note how full the KV cache of this worker's engine is, and how many requests wait for room in it."""
        self.cache_used, self.waiting_requests = used, waiting

    def heard_by(self, device: Device) -> Device:
        """Return the device with the callables by which roles and nodes tell this pulse what they do."""
        return replace(
            device,
            progress=self.beat,
            stage=self.stage,
            waiting=self.waiting,
            engine_has=self.engine_has,
            engine_cache=self.engine_cache,
        )

    @property
    def place(self) -> str:
        """Where the worker's task is; empty between tasks."""
        return next(iter(self._places[-1:]), "")

    @property
    def waits(self) -> bool:
        """Whether the task does nothing but wait for other workers."""
        return self._waits > 0

    def read(self) -> list[Any]:
        """Return the reading as plain data, for a heartbeat."""
        self.read_at = time.monotonic()
        return [self._beats, self.place, self.waits]
