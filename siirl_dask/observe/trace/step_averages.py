"""Sums up what the trace has measured of a run's nodes and edges, for an average training step.

Bytes are those that came from other workers. What the trace does not have is None, never 0: a run
of an earlier version recorded no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from siirl_dask.observe.trace.bottleneck import chain_times, covered
from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.planner import Phase
from siirl_dask.trace import Lane

_RECEIVED = ("receive", "weights")


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """A node in an average step."""

    seconds: float
    """Seconds on the worker where it took longest, without waits for others."""
    worker: str
    mean_seconds: float
    """Mean of the workers that run it."""
    memory: int | None
    """Most resident bytes that a worker's process had when the node ended; None where they were
    not recorded."""


@dataclass(frozen=True, slots=True)
class MeasuredEdge:
    """An edge in an average step."""

    received: float
    """Bytes that came from other workers, of all workers."""
    moving: float
    """Seconds in which the worker that took longest published or received."""
    waiting: float
    """Seconds for which the worker that waited longest waited for the rows to be made."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An average training step."""

    steps: Sequence[int]
    """Steps that were looked at, ascending."""
    seconds: float
    """Seconds of a step: those in which any worker was in one, by the number of steps."""
    workers: Sequence[str]
    nodes: Mapping[str, MeasuredNode]
    edges: Mapping[str, MeasuredEdge]
    """Edges by name, as ``rollout->update``."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Most resident bytes of each worker at the end of a node, where they were recorded."""


def measure(spans: Sequence[TraceSpan]) -> Measured | None:
    """Return what the training steps among ``spans`` took; None where there is none."""
    training = [
        span
        for span in spans
        if span.phase == Phase.TRAIN and not span.beside and not span.is_count
    ]
    by_worker: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in training:
        by_worker[span.worker].append(span)
    if not training:
        return None
    steps = sorted({span.step for span in training})
    busy: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    moving: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    waiting: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    received: dict[str, int] = defaultdict(int)
    for worker, own in by_worker.items():
        for span, left in chain_times(own):
            if span.lane is Lane.COMPUTE:
                busy[span.name][worker] += left
            elif span.lane is Lane.TRANSFER:
                moving[span.name][worker] += left
                received[span.name] += 0  # an edge that moved nothing is listed as well
                if span.what in _RECEIVED and span.amount:
                    received[span.name] += span.amount
            elif span.lane is Lane.WAIT and span.what in ("rows", "weights"):
                waiting[span.name][worker] += left
    each = 1e9 * len(steps)
    by_node, by_process = _memory(training)
    return Measured(
        steps=steps,
        seconds=covered(training) / each,
        workers=in_order(by_worker),
        nodes={name: _node(times, each, by_node.get(name)) for name, times in busy.items()},
        edges={
            name: MeasuredEdge(
                received[name] / len(steps), _most(moving[name]) / each, _most(waiting[name]) / each
            )
            for name in dict.fromkeys((*moving, *waiting))
        },
        memory=by_process,
    )


def usual_step(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Return the spans of all workers' chains in the training step whose length is the median;
    none without one.
    """
    of_step: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.phase == Phase.TRAIN and not span.beside and not span.is_count:
            of_step[span.step].append(span)
    lasted = {}
    for step, own in of_step.items():
        start = min(span.start for span in own)
        lasted[step] = max(span.end for span in own) - start
    if not lasted:
        return []
    middle = median(lasted.values())

    def distance(step: int) -> tuple[float, int]:
        return abs(lasted[step] - middle), -step

    return of_step[min(lasted, key=distance)]


def _node(times: Mapping[str, int], each: float, memory: int | None) -> MeasuredNode:
    slowest = max(times, key=lambda worker: times[worker])
    return MeasuredNode(
        times[slowest] / each, slowest, sum(times.values()) / len(times) / each, memory
    )


def _memory(spans: Sequence[TraceSpan]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the most resident bytes by node, and by worker."""
    by_node: dict[str, int] = {}
    by_worker: dict[str, int] = {}
    for span in spans:
        if span.lane is Lane.COMPUTE and span.what == "node" and span.amount is not None:
            by_node[span.name] = max(span.amount, by_node.get(span.name, 0))
            by_worker[span.worker] = max(span.amount, by_worker.get(span.worker, 0))
    return by_node, by_worker


def _most(times: Mapping[str, int]) -> int:
    return max(times.values(), default=0)
