"""Says where the time of a run goes, and who is slow, from its trace.

The spans of a worker's chain lie within one another, and each counts for what the spans within it
leave: the time of a node is what it computes, without its waits for other workers. What runs beside
the chain costs the step nothing and is not counted, nor is the start of a run, which has a figure
of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.trace import START, Lane

_MOVES = (Lane.TRANSFER, Lane.STORAGE)


@dataclass(slots=True)
class WorkerTime:
    """Where the time of one worker went, in nanoseconds."""

    worker: str
    wall: int = 0
    """Time of its tasks, and between them."""
    lanes: Counter[Lane] = field(default_factory=Counter)
    """Time in each lane."""
    nodes: Counter[str] = field(default_factory=Counter)
    """Time in each node."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Waits by the edge or node, and the worker that was waited for; that is empty where it is
    not known."""
    received: int = 0
    """Bytes of rows and weights that came."""

    @property
    def explained(self) -> float:
        """Share of the time that nodes, transfers, storage and waits explain."""
        known = sum(time for lane, time in self.lanes.items() if lane is not Lane.CONTROL)
        if self.wall:
            return known / self.wall
        return 1.0

    def share(self, lanes: Collection[Lane]) -> float:
        """Return the share of the time that was spent in these lanes."""
        if self.wall:
            return sum(self.lanes[lane] for lane in lanes) / self.wall
        return 0.0


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The time of a node on the worker where it took longest."""

    node: str
    worker: str
    seconds: float
    """Seconds of an average step, without waits."""
    share: float
    """Share of the time of all steps."""
    times_others: float | None
    """Its time divided by the median of the other workers'; None where no other one runs the
    node."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Where the time of some steps went."""

    steps: int
    seconds: float
    """Seconds in which any worker was there."""
    start: NodeTime | None
    """The part of the run's start that took longest; None where the steps do not begin with one."""
    workers: Sequence[WorkerTime]
    """Sorted by name, numbers by value."""
    nodes: Sequence[NodeTime]
    """The slowest first."""
    uneven: NodeTime | None
    """The node and worker that kept the others of its role waiting longest; None where none did for
    a hundredth of the time."""
    dropped: int
    """Spans that were too many to be kept."""

    @property
    def slowest(self) -> NodeTime | None:
        """The node that took longest, with the worker where it did; None where no node has run."""
        return next(iter(self.nodes), None)


def find_bottleneck(spans: Sequence[TraceSpan]) -> Bottleneck:
    """Return where the time of all ``spans`` went."""
    by_worker: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.phase != START:
            by_worker[span.worker].append(span)
    causes = WaitCauses(spans)
    start = _start(spans)
    workers = [_worker_time(worker, by_worker[worker], causes) for worker in in_order(by_worker)]
    steps = max(1, len({span.step for span in spans if not span.is_count}))
    wall = covered([span for own in by_worker.values() for span in own])
    nodes = sorted(_node_times(workers, steps, wall), key=lambda one: -one.seconds)
    dropped = 0
    for span in spans:
        if span.is_count and span.name == "dropped":
            dropped += span.amount or 0
    return Bottleneck(
        steps,
        wall / 1e9,
        start=start,
        workers=workers,
        nodes=nodes,
        uneven=_uneven(workers, nodes, steps, wall),
        dropped=dropped,
    )


def chain_times(spans: Sequence[TraceSpan]) -> Iterator[tuple[TraceSpan, int]]:
    """Yield each span of one worker's chain with the nanoseconds that the spans within it leave."""
    around: list[tuple[TraceSpan, list[int]]] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.duration)):
        if span.beside or span.is_count:
            continue
        while around and around[-1][0].end <= span.start:
            yield _left(*around.pop())
        if around:
            outer, within = around[-1]
            within.append(min(span.end, outer.end) - span.start)
        around.append((span, []))
    while around:
        yield _left(*around.pop())


def _left(span: TraceSpan, within: list[int]) -> tuple[TraceSpan, int]:
    return span, max(0, span.duration - sum(within))


def covered(spans: Sequence[TraceSpan]) -> int:
    """Return the nanoseconds in which any of the chains' spans was under way: a run may have
    stood still for a day.
    """
    total = 0
    until = 0
    for span in sorted(spans, key=lambda one: one.start):
        if not span.beside:
            total += max(0, span.end - max(span.start, until))
            until = max(until, span.end)
    return total


def _start(spans: Sequence[TraceSpan]) -> NodeTime | None:
    """Return the part of the start that took longest, of all workers."""
    begun = [span for span in spans if span.phase == START]
    parts = [
        span
        for span in begun
        if span.lane is not Lane.CONTROL and span.what != "task" and not span.beside
    ]
    if not parts:
        return None
    longest = max(parts, key=lambda one: one.duration)
    wall = covered(begun)
    return NodeTime(
        longest.name, longest.worker, longest.duration / 1e9, longest.duration / max(1, wall), None
    )


def _worker_time(worker: str, spans: Sequence[TraceSpan], causes: WaitCauses) -> WorkerTime:
    own = [span for span in spans if not span.beside]
    time = WorkerTime(worker)
    if not own:
        return time
    time.wall = covered(own)
    for span, left in chain_times(own):
        time.lanes[span.lane] += left
        if span.lane is Lane.COMPUTE:
            time.nodes[span.name] += left
        if span.lane is Lane.WAIT:
            time.waits[span.name, causes.of(span)] += left
        if span.lane is Lane.TRANSFER and span.what != "publish":
            time.received += span.amount or 0
    return time


class WaitCauses:
    """Finds the worker that a wait was for: the last to publish rows or weights, or the one that
    waited least.
    """

    def __init__(self, spans: Sequence[TraceSpan]) -> None:
        self._published: dict[tuple[str, int], TraceSpan] = {}
        self._peers: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        for span in spans:
            key = span.name, span.sequence
            if span.lane is Lane.TRANSFER and span.what == "publish":
                last = self._published.get(key)
                if last is None or span.end > last.end:
                    self._published[key] = span
            elif span.lane is Lane.WAIT and span.what == "peers":
                self._peers[key][span.worker] += span.duration

    def made(self, wait: TraceSpan) -> TraceSpan | None:
        """Return the last publication of what a wait was for; None where it was there before, or
        is not known.
        """
        if wait.what not in ("rows", "weights"):
            return None
        last = self._published.get((wait.name, wait.sequence))
        if last is not None and last.end > wait.start:
            return last
        return None

    def of(self, wait: TraceSpan) -> str:
        """Return the worker that a wait was for; an empty text where it is not known."""
        last = self.made(wait)
        if last is not None:
            return last.worker
        key = wait.name, wait.sequence
        if wait.what == "peers" and len(waited := self._peers[key]) > 1:
            least = min(waited, key=lambda worker: waited[worker])
            if least != wait.worker:
                return least
            return ""
        return ""


def _node_times(workers: Sequence[WorkerTime], steps: int, wall: int) -> Iterator[NodeTime]:
    for node in dict.fromkeys(node for worker in workers for node in worker.nodes):
        times = {worker.worker: worker.nodes[node] for worker in workers if node in worker.nodes}
        slowest = max(times, key=lambda worker: times[worker])
        others = [time for worker, time in times.items() if worker != slowest]
        usual = median(others) if others else 0
        yield NodeTime(
            node=node,
            worker=slowest,
            seconds=times[slowest] / steps / 1e9,
            share=times[slowest] / wall if wall else 0.0,
            times_others=times[slowest] / usual if usual else None,
        )


def _uneven(
    workers: Sequence[WorkerTime],
    nodes: Sequence[NodeTime],
    steps: int,
    wall: int,
) -> NodeTime | None:
    """Return the node that took most longer on one worker than on the median of the others."""
    costs = {}
    for one in nodes:
        if one.times_others and one.times_others > 1:
            costs[one.node] = one.seconds * (1 - 1 / one.times_others)
    worst = max(nodes, key=lambda one: costs.get(one.node, 0.0), default=None)
    if worst is None:
        return None
    cost = costs.get(worst.node, 0.0) * steps
    if cost > 0.01 * wall / 1e9:
        return worst
    return None


def moving_share(worker: WorkerTime) -> float:
    """Return the share of a worker's time in which it moved rows and weights, or wrote and read
    tables.
    """
    return worker.share(_MOVES)


def longest_wait(worker: WorkerTime) -> tuple[str, str, float] | None:
    """Return edge or node, worker that was waited for, and share of its time, of a worker's
    longest wait.
    """
    if not worker.waits or not worker.wall:
        return None
    (name, cause), time = worker.waits.most_common(1)[0]
    return name, cause, time / worker.wall
