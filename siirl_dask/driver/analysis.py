"""Holds a plan's estimates against what a run has measured, and scales what was measured to other splits of workers.

    bytes    the estimate at the greatest lengths, the same at the mean lengths of the steps, and what came from peers
    seconds  of a device's figures, if one is named, and of the trace: the slowest worker's, without its waits
    memory   the planner's bound of a worker, and its process's resident bytes at the ends of its nodes

Nothing is made up: what the run has not measured, or the planner cannot know, is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from siirl_dask.config import Config
from siirl_dask.driver.memory import WorkerMemory
from siirl_dask.driver.node_seconds import Lengths, NodeSeconds, Placement
from siirl_dask.driver.performance import Split, schedule, splits_by
from siirl_dask.driver.speeds import Speed
from siirl_dask.observe.measured import Measured
from siirl_dask.observe.metrics import Record
from siirl_dask.planner import DATA, Plan, Sizes, estimate
from siirl_dask.planner.explain.sizes import rows_made
from siirl_dask.schema import PARAMETER_DATA, PROMPT_IDS, RESPONSE_IDS

_TIMES = 1.5  # by which a measurement differs from its estimate before it is marked
_ROWS = 1.01  # the same, of rows


@dataclass(frozen=True, slots=True)
class Compared:
    """An estimate and what was measured; None where the planner cannot know, or the run has not measured."""

    estimated: float | None
    measured: float | None
    times: float = _TIMES
    """Factor by which they may differ before that is told."""
    above_only: bool = False
    """True where a measurement may well be below its estimate: a bound, or bytes of rows that need not all move."""

    @property
    def ratio(self) -> float | None:
        """The measurement divided by the estimate; None where one of them is unknown or 0."""
        return self.measured / self.estimated if self.measured and self.estimated else None

    @property
    def deviates(self) -> bool:
        """Whether they differ by more than a factor of ``times``, in a direction that is told."""
        if self.estimated is None or self.measured is None:
            return False
        above = self.measured > self.estimated * self.times
        return above or (not self.above_only and self.measured * self.times < self.estimated)


@dataclass(frozen=True, slots=True)
class EdgeAnalysis:
    """An edge of the plan in an average step."""

    source: str
    target: str
    moves: bool
    rows: Compared
    most_bytes: int | None
    """Bound of its bytes at the greatest lengths."""
    bytes: Compared
    """The estimate at the mean lengths of the steps, and what came from other workers."""
    unknown: tuple[str, ...]
    """Columns that are not in the estimates."""
    waiting: float | None
    """Seconds for which the worker that waited longest waited for its rows."""


@dataclass(frozen=True, slots=True)
class NodeAnalysis:
    """A node of the plan in an average step."""

    name: str
    role: str
    workers: int
    seconds: Compared
    share: float | None
    """Share of the step's time."""
    worker: str | None
    """The worker where it took longest."""
    memory: int | None
    """Most resident bytes of a worker's process when the node ended."""


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """The memory of workers that have the same roles."""

    workers: tuple[str, ...]
    roles: tuple[str, ...]
    bytes: Compared
    """The planner's bound, and the most that a worker's process had at the end of a node."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """A plan beside what a run of it has measured."""

    measured: Measured
    lengths: Lengths | None
    """Mean lengths of the steps that were measured; None where they were not logged."""
    edges: Sequence[EdgeAnalysis]
    nodes: Sequence[NodeAnalysis]
    memory: Sequence[MemoryAnalysis]
    seconds: Compared
    """Seconds of a step."""
    splits: Sequence[Split]
    """Splits of the workers with the seconds that a step would take, the fastest first."""


def mean_lengths(records: Sequence[Record], longest: int) -> Lengths | None:
    """Return the mean tokens of prompts and responses; None where the records do not say."""
    means = {name: _mean(records, name) for name in ("tokens", "samples", "response/length")}
    tokens, rows, response = (means[name] for name in ("tokens", "samples", "response/length"))
    if not tokens or not rows or not response:
        return None
    return Lengths(max(0.0, tokens / rows - response), response, float(longest))


def analyze(
    config: Config,
    plan: Plan,
    sizes: Sizes,
    memory: Sequence[WorkerMemory],
    measured: Measured,
    records: Sequence[Record],
    speed: Speed | None,
    lengths: Lengths | None,
) -> Analysis:
    """Return the plan beside what was measured in the steps of ``records``.

    ``speed`` are the figures of a device for which seconds are estimated, at ``lengths``; None: they are not.
    """
    placed = {role: len(workers) for role, workers in plan.placement.items()}
    model = NodeSeconds(config, plan, speed, lengths) if speed and lengths else None
    estimated = model.on(plan.placement) if model else None
    nodes = [_node(plan, name, measured, estimated) for name in plan.stages]
    took = {name: node.seconds for name, node in measured.nodes.items() if name in plan.stages}
    rest = max(0.0, measured.seconds - schedule(config, plan, took, plan.placement, 0.0).seconds)
    scaled = _Scaled(plan, took, placed, model)
    step = None
    if estimated is not None and speed is not None:
        overhead = speed.overhead * (1 + sum(edge.moves for edge in plan.edges))
        step = schedule(config, plan, estimated, plan.placement, overhead).seconds
    return Analysis(
        measured=measured,
        lengths=mean_lengths(records, config.rollout.max_response_length),
        edges=_edges(plan, sizes, measured, records, lengths),
        nodes=nodes,
        memory=[_memory(group, measured) for group in memory],
        seconds=Compared(step, measured.seconds),
        splits=splits_by(config, plan, scaled.on, rest) if took else [],
    )


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Scales measured seconds to other numbers of workers.

    By the performance model's ratio where it knows the node. Otherwise work is divided evenly among a role's workers,
    but for nodes that take or give weights: each has all of them.
    """

    plan: Plan
    took: Mapping[str, float]
    placed: Mapping[str, int]
    model: NodeSeconds | None

    def on(self, placement: Placement) -> dict[str, float] | None:
        """Return the seconds of each node where roles are placed so."""
        then = (self.model.on(self.plan.placement) if self.model else None) or {}
        now = (self.model.on(placement) if self.model else None) or {}
        found = {}
        for name, seconds in self.took.items():
            node = self.plan.stages[name].node
            weights = PARAMETER_DATA in (*node.contract.reads, *node.contract.writes.names)
            if then.get(name) and name in now:
                found[name] = seconds * now[name] / then[name]
            else:
                found[name] = seconds if weights else seconds * self.placed[node.role] / len(placement[node.role])
        return found


def _node(plan: Plan, name: str, measured: Measured, estimated: Mapping[str, float] | None) -> NodeAnalysis:
    node, took = plan.stages[name].node, measured.nodes.get(name)
    return NodeAnalysis(
        name=name,
        role=node.role,
        workers=len(plan.placement[node.role]),
        seconds=Compared(estimated.get(name) if estimated else None, took.seconds if took else None),
        share=took.seconds / measured.seconds if took and measured.seconds else None,
        worker=took.worker if took else None,
        memory=took.memory if took else None,
    )


def _edges(
    plan: Plan, sizes: Sizes, measured: Measured, records: Sequence[Record], lengths: Lengths | None
) -> list[EdgeAnalysis]:
    bounds = estimate(plan, sizes)
    usual = bounds if lengths is None else estimate(plan, _of_lengths(sizes, lengths))
    rows = _measured_rows(plan, sizes, records)
    moving = {edge.ends: edge.name for edge in plan.edges if edge.moves}
    found = []
    for ends, bound in bounds.items():
        moves = ends in moving
        seen = measured.edges.get(moving[ends]) if moves else None
        expected = usual[ends].bytes if moves and lengths is not None else None
        found.append(
            EdgeAnalysis(
                ends[0],
                ends[1],
                moves=moves,
                rows=Compared(bound.rows, None if ends[2:] else rows.get(plan.stages[ends[1]].rows), _ROWS),
                most_bytes=bound.bytes if moves else None,
                bytes=Compared(expected, seen.received if seen else None, above_only=True),
                unknown=bound.unknown,
                waiting=seen.waiting if seen else None,
            )
        )
    return found


def _of_lengths(sizes: Sizes, lengths: Lengths) -> Sizes:
    return replace(sizes, prompt_tokens=round(lengths.prompt), response_tokens=round(lengths.response))


def _measured_rows(plan: Plan, sizes: Sizes, records: Sequence[Record]) -> dict[str, float | None]:
    """Return the rows of an average step by the node that made them: prompts, and what was sampled for them."""
    found: dict[str, float | None] = {}
    for maker in rows_made(plan, sizes):
        written = () if maker == DATA else plan.stages[maker].node.contract.writes.names
        if RESPONSE_IDS in written:
            found[maker] = _mean(records, "samples")
        elif maker == DATA or PROMPT_IDS in written:
            found[maker] = _mean(records, "data/prompts")
    return found


def _memory(group: WorkerMemory, measured: Measured) -> MemoryAnalysis:
    seen = max((measured.memory[worker] for worker in group.workers if worker in measured.memory), default=None)
    return MemoryAnalysis(group.workers, tuple(group.roles), Compared(group.total, seen, times=1.0, above_only=True))


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [value for record in records if (value := record["metrics"].get(name)) is not None]
    return sum(values) / len(values) if values else None
