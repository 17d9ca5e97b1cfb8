"""Records where a worker's time goes, in bounded memory: spans of its chain, spans beside it, and
counts.

The chain is what a worker's own thread does, link after link: its spans follow one another or lie
within one another. What runs beside it, such as a table that is written while the next node
computes, may overlap anything. Times are nanoseconds of the monotonic clock, which stands still for
nobody: a worker that was stopped shows as slow.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

SHARED = "shared memory"
SENT = "messages"
"""Ways from worker to worker."""
FROM = "from "
"""How the names of entries begin that count bytes from a worker."""
# sources of an iteration that are recorded one by one, those with the most bytes
_MOST_SOURCES = 128
START = "start"
"""Phase of what a worker does before its first iteration."""
# entries between two drains: a chain has some dozens of links, a weight stream some hundred tables
_MOST = 8192
_POINTS = 128  # of a count between two drains
# nanoseconds between two points of a count, doubled when there are too many of them
_FIRST_PAUSE = 10_000_000


class Lane(StrEnum):
    """Kinds of what a worker does."""

    COMPUTE = "compute"
    """Nodes, and the building of roles."""
    TRANSFER = "transfer"
    """Rows and weights that come or go."""
    STORAGE = "storage"
    """Tables and checkpoints that are written, prompts and stored rows that are read."""
    WAIT = "wait"
    """Waits for other workers, and for the next task."""
    ENGINE = "engine"
    """Requests that an engine has under way."""
    CONTROL = "control"
    """Tasks as a whole. What none of the other lanes explains of them is the chain's own work."""


class Entry(NamedTuple):
    """A span, or a point of a count, whose duration is 0."""

    lane: str
    what: str
    """Kind within the lane, such as ``node`` or ``rows``."""
    name: str
    """Node, edge, table or worker that it is about."""
    beside: bool
    """True if it ran beside the chain."""
    phase: str
    sequence: int
    """Number of the iteration; for rows on an edge, of the iteration that they belong to."""
    start: int
    """Nanoseconds of this worker's monotonic clock."""
    duration: int
    """Nanoseconds."""
    amount: int | None
    """Bytes of a transfer or a file; bytes that the process had in memory when a node ended;
    value of a count."""


class Span:
    """A span that is under way; of the chain, if its thread is the chain's. ``amount`` may be
    set until it ends.
    """

    __slots__ = ("_beside", "_lane", "_name", "_recorder", "_sequence", "_start", "_what", "amount")

    def __init__(
        self,
        recorder: Recorder,
        lane: Lane,
        what: str,
        name: str,
        sequence: int | None,
    ) -> None:
        self._recorder = recorder
        self._lane = lane
        self._what = what
        self._name = name
        self._sequence = sequence
        self.amount: int | None = None

    def __enter__(self) -> Span:
        self._beside = not self._recorder.enter(self._name)
        self._start = time.monotonic_ns()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._beside:
            self._recorder.leave()
        self._recorder.add(
            self._lane,
            self._what,
            self._name,
            self._start,
            amount=self.amount,
            sequence=self._sequence,
            beside=self._beside,
        )


class _Nothing(Span):
    """Stands for a span that is not recorded."""

    __slots__ = ()

    def __init__(self) -> None:
        self.amount = None

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Recorder:
    """Holds what one worker did since the last drain: the newest entries, and the number of those
    that were too many.

    Any thread may add an entry; the chain's is that of the task under way. One that is not
    ``enabled`` records nothing.
    """

    def __init__(self, *, enabled: bool = True, most: int = _MOST) -> None:
        self.enabled = enabled
        self._entries: deque[Entry] = deque(maxlen=most)
        self._most = most
        self._dropped = 0
        self._counts: dict[tuple[Lane, str], _Count] = {}
        self._open: list[str] = []
        self._phase = START
        self._sequence = 0
        self._idle_since: int | None = None
        self._thread = threading.get_ident()

    def begin(self, phase: str, sequence: int) -> None:
        """Record what follows under another iteration."""
        self._phase = phase
        self._sequence = sequence

    @contextmanager
    def task(self) -> Iterator[None]:
        """Record a task of the chain, and the wait for it since the one before."""
        if not self.enabled:
            self._idle_since = None
            yield
            return
        began = time.monotonic_ns()
        self._thread = threading.get_ident()
        if self._idle_since is not None:
            self.add(Lane.WAIT, "task", "next task", self._idle_since, began, beside=False)
        try:
            yield
        finally:
            self.add(Lane.CONTROL, "task", self._phase, began, beside=False)
            self._idle_since = time.monotonic_ns()

    def span(self, lane: Lane, what: str, name: str = "", *, sequence: int | None = None) -> Span:
        """Return a context manager that records a span. Without ``name`` it has that of the
        chain's span around it.
        """
        if not self.enabled:
            return _Nothing()
        return Span(self, lane, what, name or next(iter(self._open[-1:]), START), sequence)

    def add(
        self,
        lane: Lane,
        what: str,
        name: str,
        start: int,
        end: int | None = None,
        *,
        amount: int | None = None,
        sequence: int | None = None,
        beside: bool = True,
    ) -> None:
        """Record what began at ``start`` and ended at ``end``, which is now by default."""
        if not self.enabled:
            return
        end = time.monotonic_ns() if end is None else end
        number = self._sequence if sequence is None else sequence
        self._put(
            Entry(
                lane=lane,
                what=what,
                name=name,
                beside=beside,
                phase=self._phase,
                sequence=number,
                start=start,
                duration=max(0, end - start),
                amount=amount,
            )
        )

    def count(self, lane: Lane, name: str, value: int) -> None:
        """Record that a count has reached ``value``; of counts that change often, some points
        are kept.
        """
        if not self.enabled:
            return
        count = self._counts.get((lane, name))
        if count is None:
            count = self._counts.setdefault((lane, name), _Count())
        count.add(time.monotonic_ns(), value)

    def drain(self) -> list[Entry]:
        """Return and forget all entries, in the order in which they ended. What is added
        meanwhile may stay.
        """
        for (lane, name), count in [*self._counts.items()]:
            for at, value in count.drain():
                self._put(self._count_of(lane, name, at, value))
        drained = [self._entries.popleft() for _ in range(len(self._entries))]
        if self._dropped and drained:
            dropped = self._dropped
            self._dropped = 0
            at = drained[0].start
            drained.append(self._count_of(Lane.CONTROL, "dropped", at, dropped))
        return drained

    def _count_of(self, lane: Lane, name: str, at: int, value: int) -> Entry:
        return Entry(
            lane=lane,
            what="count",
            name=name,
            beside=True,
            phase=self._phase,
            sequence=self._sequence,
            start=at,
            duration=0,
            amount=value,
        )

    def enter(self, name: str) -> bool:
        """Note that a span begins, and return whether it is one of the chain."""
        if threading.get_ident() != self._thread:
            return False
        self._open.append(name)
        return True

    def leave(self) -> None:
        """Note that the chain's span that began last ends."""
        self._open.pop()

    def _put(self, entry: Entry) -> None:
        if len(self._entries) == self._most:
            self._dropped += 1  # the oldest: what a step does last is what nobody has seen yet
        self._entries.append(entry)


def record_transfers(
    trace: Recorder,
    received: Counter[str],
    shared: Mapping[str, int],
    at: int,
) -> None:
    """Record the bytes that came from each worker in an iteration, of which ``shared`` came through
    shared memory. ``at`` is the time in nanoseconds.
    """
    for worker, total in received.most_common(_MOST_SOURCES):
        through_memory = shared.get(worker, 0)
        for way, nbytes in ((SHARED, through_memory), (SENT, total - through_memory)):
            if nbytes > 0:
                name = f"{FROM}{worker} by {way}"
                trace.add(Lane.TRANSFER, "count", name, at, at, amount=nbytes)


class _Count:
    """Points of a count: the more there are, the further apart, but none that is 0 or follows
    one is left out.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._pause = _FIRST_PAUSE
        self._due = 0
        self._last = 0

    def add(self, at: int, value: int) -> None:
        edge = 0 in (value, self._last)
        self._last = value
        if at < self._due and not edge:
            return
        self._due = at + self._pause
        points = self._points
        points.append((at, value))
        if len(points) > _POINTS:
            self._pause *= 2
            thinned = [
                point
                for number, point in enumerate(points)
                if number % 2 == 0 or not point[1] or not points[number - 1][1]
            ]
            self._points = thinned[-_POINTS:]

    def drain(self) -> list[tuple[int, int]]:
        points = self._points
        self._points = []
        self._pause = _FIRST_PAUSE
        return points
