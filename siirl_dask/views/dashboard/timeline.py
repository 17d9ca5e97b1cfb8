"""Turns a trace into bars of a timeline: what each worker did when, what it waited for, and the
critical path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from siirl_dask.observe.trace.bottleneck import WaitCauses
from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.trace import START, Lane

OWN = "between nodes"
"""Name of time that no span explains."""
MOST_BARS = 4000
_LEAST = 1500  # bars side by side across the page: shorter ones cannot be seen
_JUMPS = 10_000  # parts of a critical path


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of a worker's time, in seconds since the first one shown."""

    worker: str
    lane: Lane
    name: str
    """Node, edge or table."""
    what: str
    start: float
    end: float
    step: int
    beside: bool
    """True if it ran beside the chain."""
    waits_for: str = ""
    """Worker that a wait was for, as far as it is known."""
    amount: int | None = None
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the critical path."""

    worker: str
    start: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Some steps of a run, as they went."""

    workers: Sequence[str]
    """Sorted, numbers by value."""
    bars: Sequence[Bar]
    critical: Sequence[Stretch]
    """The chain of work that the last step's end waited for, ascending."""
    seconds: float
    """Length of the time that is shown."""
    left_out: int
    """Bars that were too short or too many to be shown."""


def timeline(spans: Sequence[TraceSpan], workers: Sequence[str] | None = None) -> Timeline:
    """Return the timeline of the spans, but for the start of the run: those of ``workers`` alone if
    given.

    Bars of one chain lie one after the other. Those shorter than a pixel or so are left out, and
    the shortest of more than ``MOST_BARS``.
    """
    shown = [span for span in spans if span.phase != START and not span.is_count]
    if not shown:
        return Timeline((), (), (), 0.0, 0)
    first = min(span.start for span in shown)
    last = max(span.end for span in shown)
    causes = WaitCauses(spans)
    by_worker = defaultdict[str, list[TraceSpan]](list)
    for span in shown:
        by_worker[span.worker].append(span)
    names = in_order(by_worker)
    leaves = Leaves({name: by_worker[name] for name in names})
    chosen = [name for name in names if workers is None or name in workers]
    everything = [
        _bar(span, first, causes.of(span) if span.lane is Lane.WAIT else "")
        for name in chosen
        for span in (*leaves[name], *_moved_beside(by_worker[name]))
    ]
    least = (last - first) / 1e9 / _LEAST
    seen = [bar for bar in everything if bar.end - bar.start >= least]
    if len(seen) > MOST_BARS:
        seen = sorted(seen, key=lambda bar: bar.start - bar.end)[:MOST_BARS]
    path = [
        Stretch(span.worker, (span.start - first) / 1e9, (span.end - first) / 1e9, span.name)
        for span in critical_path(leaves, causes)
    ]
    seen.sort(key=lambda bar: bar.start)
    return Timeline(
        chosen, seen, _joined(path, least), (last - first) / 1e9, len(everything) - len(seen)
    )


class Leaves:
    """The leaves of each worker's chain, found when they are asked for: of hundreds of workers few
    are drawn, or lie on the critical path.
    """

    def __init__(self, spans: Mapping[str, Sequence[TraceSpan]]) -> None:
        self._spans = spans
        self._known: dict[str, list[TraceSpan]] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._spans

    def __getitem__(self, worker: str) -> list[TraceSpan]:
        if worker not in self._known:
            self._known[worker] = list(leaf_spans(self._spans[worker]))
        return self._known[worker]

    def last_working(self) -> TraceSpan | None:
        """Return the leaf that ends last, waits left out; where several do, that of the first worker.
        None where there is none.

        No leaf of a worker ends after its chain: leaves are only found for workers whose chains end
        late enough to have the last one.
        """
        ends = {
            name: max((span.end for span in spans if not span.beside), default=0)
            for name, spans in self._spans.items()
        }
        last: TraceSpan | None = None
        last_number = 0
        for number, name in sorted(enumerate(ends), key=lambda one: (-ends[one[1]], one[0])):
            if last is not None and (last.end, -last_number) > (ends[name], -number):
                break
            own = self[name]
            if own:
                found = _working(own)
                if last is None or (found.end, -number) > (last.end, -last_number):
                    last = found
                    last_number = number
        return last


def leaf_spans(spans: Sequence[TraceSpan]) -> Iterator[TraceSpan]:
    """Yield a worker's chain as spans that follow one another: of each span the parts in which no
    other span lies.
    """
    around: list[TraceSpan] = []
    at = 0

    def until(end: int) -> Iterator[TraceSpan]:
        nonlocal at
        while around:
            stop = min(end, around[-1].end)
            if stop > at:
                yield _part(around[-1], at, stop)
                at = stop
            if around[-1].end > end:
                return
            around.pop()
        at = max(at, end)

    for span in sorted(spans, key=lambda one: (one.start, -one.duration)):
        if span.beside or span.is_count or not span.duration:
            continue
        yield from until(span.start)
        around.append(span)
    if around:
        yield from until(max(span.end for span in around))


def critical_path(leaves: Leaves, causes: WaitCauses) -> list[TraceSpan]:
    """Return the chain of spans that the end of the last step waited for, in order of time.

    It is found from the end backwards: a wait for rows leads to the worker that made them last, a
    wait within a collective to the one that came last, and one for nobody known is a part of the
    path itself.
    """
    at_end = leaves.last_working()
    if at_end is None:
        return []
    path = list[TraceSpan]()
    worker = at_end.worker
    until = at_end.end
    for _ in range(_JUMPS):
        span = _last_before(leaves[worker], until)
        if span is None:
            break
        end = min(span.end, until)
        cause = ""
        if span.lane is Lane.WAIT:
            cause = causes.of(span)
        if cause and cause != worker and cause in leaves:
            made = causes.made(span)
            worker = cause
            until = end
            if made:
                until = min(end, made.end)
            if until > span.start:
                continue
            worker = span.worker  # it had been there before the wait began
        if end > span.start:
            path.append(_part(span, span.start, end))
        until = span.start
    return path[::-1]


def _joined(path: Sequence[Stretch], least: float) -> list[Stretch]:
    """Join stretches that follow one another on a worker and have one name, or are too short to
    be seen.
    """
    joined: list[Stretch] = []
    for one in path:
        before = None
        if joined:
            before = joined[-1]
        if (
            before is not None
            and before.worker == one.worker
            and (
                before.name == one.name
                or min(before.end - before.start, one.end - one.start) < least
            )
        ):
            longer = max(before, one, key=lambda part: part.end - part.start)
            joined[-1] = Stretch(one.worker, before.start, one.end, longer.name)
        else:
            joined.append(one)
    return joined


def _working(own: Sequence[TraceSpan]) -> TraceSpan:
    """Return the last span of a chain that is no wait, or the last one."""
    return next((span for span in reversed(own) if span.lane is not Lane.WAIT), own[-1])


def _last_before(own: Sequence[TraceSpan], until: int) -> TraceSpan | None:
    """Return the chain's last span that begins before ``until``."""
    low = 0
    high = len(own)
    while low < high:
        middle = (low + high) // 2
        if own[middle].start < until:
            low = middle + 1
        else:
            high = middle
    if low:
        return own[low - 1]
    return None


def _part(span: TraceSpan, start: int, end: int) -> TraceSpan:
    """Return what is left of a span of the chain, under the name that it is shown with."""
    name = span.name
    if span.lane is Lane.CONTROL:
        name = OWN
    return span._replace(name=name, start=start, duration=end - start)


def _moved_beside(spans: Sequence[TraceSpan]) -> Iterator[TraceSpan]:
    """Yield what was moved beside the chain; computing there, such as scoring early, is a node's
    own business.
    """
    return (
        span
        for span in spans
        if span.beside and span.lane in (Lane.TRANSFER, Lane.STORAGE) and span.duration
    )


def _bar(span: TraceSpan, first: int, cause: str) -> Bar:
    start = (span.start - first) / 1e9
    end = (span.end - first) / 1e9
    return Bar(
        span.worker,
        span.lane,
        name=span.name,
        what=span.what,
        start=start,
        end=end,
        step=span.step,
        beside=span.beside,
        waits_for=cause,
        amount=span.amount,
    )
