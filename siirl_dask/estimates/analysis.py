"""Compares a plan's estimates with a run's measurements, and scales these to other splits of the workers.

    bytes    estimated at the greatest lengths and at the mean lengths of the steps, and measured from peers
    seconds  by a device's figures, if one is named, and by the trace: the slowest worker's, without its waits
    memory   the planner's bound of a worker, and its process's resident bytes at the ends of its nodes

A number that the run has not measured, or that the planner cannot know, is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from siirl_dask.config import Config
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.memory import WorkerMemory
from siirl_dask.estimates.node_seconds import NodeSeconds, Placement
from siirl_dask.estimates.performance import Split, schedule, splits_by
from siirl_dask.estimates.speeds import Speed
from siirl_dask.observe import Record
from siirl_dask.observe.trace.step_averages import Measured
from siirl_dask.planner import DATA, Plan, TableSizes, estimate, rows_made
from siirl_dask.schema import PARAMETER_DATA, PROMPT_IDS, RESPONSE_IDS

_TIMES = 1.5  # by which a measurement differs from its estimate before it is marked
_ROWS = 1.01  # the same, of rows


@dataclass(frozen=True, slots=True)
class Compared:
    """An estimate and a measurement; None where the planner cannot know, or the run has not
    measured.
    """

    estimated: float | None
    measured: float | None
    times: float = _TIMES
    """Factor by which they may differ before that is reported."""
    above_only: bool = False
    """True where a measurement may well be below its estimate: a bound, or bytes of rows that
    need not all move."""

    @property
    def ratio(self) -> float | None:
        """The measurement divided by the estimate; None where one of them is unknown or 0."""
        if not self.measured or not self.estimated:
            return None
        return self.measured / self.estimated

    @property
    def deviates(self) -> bool:
        """Whether they differ by more than a factor of ``times``, in a direction that is
        reported.
        """
        if self.estimated is None or self.measured is None:
            return False
        if self.measured > self.estimated * self.times:
            return True
        if self.above_only:
            return False
        return self.measured * self.times < self.estimated


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
    """Estimated at the mean lengths of the steps, and received from other workers."""
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
    """A plan, and a run's measurements of it."""

    measured: Measured
    lengths: StepTokens | None
    """Mean lengths of the steps that were measured; None where they were not logged."""
    edges: Sequence[EdgeAnalysis]
    nodes: Sequence[NodeAnalysis]
    memory: Sequence[MemoryAnalysis]
    seconds: Compared
    """Seconds of a step."""
    splits: Sequence[Split]
    """Splits of the workers with the seconds that a step would take, the fastest first."""


def mean_lengths(records: Sequence[Record], longest: int) -> StepTokens | None:
    """Return the mean tokens of prompts and responses; None where the records do not say."""
    tokens = _mean(records, "tokens")
    rows = _mean(records, "samples")
    response = _mean(records, "response/length")
    if not tokens or not rows or not response:
        return None
    return StepTokens(max(0.0, tokens / rows - response), response, float(longest))


def analyze(
    config: Config,
    plan: Plan,
    sizes: TableSizes,
    memory: Sequence[WorkerMemory],
    measured: Measured,
    records: Sequence[Record],
    speed: Speed | None,
    lengths: StepTokens | None,
) -> Analysis:
    """Return the plan with its measurements in the steps of ``records``.

    ``speed`` are the figures of a device for which seconds are estimated, at ``lengths``; None:
    they are not.
    """
    model: NodeSeconds | None = None
    estimated: dict[str, float] | None = None
    if speed is not None and lengths is not None:
        model = NodeSeconds(config, plan, speed, lengths)
        estimated = model.on(plan.placement)
    estimated_step: float | None = None
    if estimated is not None and speed is not None:
        overhead = speed.overhead * (1 + sum(edge.moves for edge in plan.edges))
        estimated_step = schedule(config, plan, estimated, plan.placement, overhead).seconds
    seconds = {name: node.seconds for name, node in measured.nodes.items() if name in plan.flow}
    rest = max(0.0, measured.seconds - schedule(config, plan, seconds, plan.placement, 0.0).seconds)
    return Analysis(
        measured=measured,
        lengths=mean_lengths(records, config.rollout.max_response_length),
        edges=_edges(plan, sizes, measured, records, lengths),
        nodes=[_node(plan, name, measured, estimated) for name in plan.flow],
        memory=[_memory(group, measured) for group in memory],
        seconds=Compared(estimated_step, measured.seconds),
        splits=splits_by(config, plan, _Scaled(plan, seconds, model).on, rest) if seconds else [],
    )


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Scales measured seconds to other numbers of workers.

    By the performance model's ratio where it knows the node. Otherwise work is divided evenly among
    a role's workers, except of nodes that read or write weights: each worker has all of them.
    """

    plan: Plan
    seconds: Mapping[str, float]
    model: NodeSeconds | None

    def on(self, placement: Placement) -> dict[str, float] | None:
        """Return the seconds of each node on the workers of ``placement``."""
        before: dict[str, float] | None = None
        after: dict[str, float] | None = None
        if self.model is not None:
            before = self.model.on(self.plan.placement)
            after = self.model.on(placement)
        scaled = {}
        for name, seconds in self.seconds.items():
            node = self.plan.flow[name].node
            if before and after and before.get(name) and name in after:
                scaled[name] = seconds * after[name] / before[name]
            elif PARAMETER_DATA in (*node.contract.reads, *node.contract.writes.names):
                scaled[name] = seconds
            else:
                scaled[name] = (
                    seconds * len(self.plan.placement[node.role]) / len(placement[node.role])
                )
        return scaled


def _node(
    plan: Plan,
    name: str,
    measured: Measured,
    estimated: Mapping[str, float] | None,
) -> NodeAnalysis:
    node = plan.flow[name].node
    estimated_seconds = None
    if estimated is not None:
        estimated_seconds = estimated.get(name)
    analysis = NodeAnalysis(
        name=name,
        role=node.role,
        workers=len(plan.placement[node.role]),
        seconds=Compared(estimated_seconds, None),
        share=None,
        worker=None,
        memory=None,
    )
    own = measured.nodes.get(name)
    if own is None:
        return analysis
    return replace(
        analysis,
        seconds=Compared(estimated_seconds, own.seconds),
        share=own.seconds / measured.seconds if measured.seconds else None,
        worker=own.worker,
        memory=own.memory,
    )


def _edges(
    plan: Plan,
    sizes: TableSizes,
    measured: Measured,
    records: Sequence[Record],
    lengths: StepTokens | None,
) -> list[EdgeAnalysis]:
    bounds = estimate(plan, sizes)
    at_mean = None
    if lengths is not None:
        mean_sizes = replace(
            sizes, prompt_tokens=round(lengths.prompt), response_tokens=round(lengths.response)
        )
        at_mean = estimate(plan, mean_sizes)
    rows = _measured_rows(plan, sizes, records)
    moving = {edge.ends: edge.name for edge in plan.edges if edge.moves}
    edges = []
    for ends, bound in bounds.items():
        moves = ends in moving
        own = None
        if moves:
            own = measured.edges.get(moving[ends])
        source, target, *by_group = ends
        expected_bytes = None
        if moves and at_mean is not None:
            expected_bytes = at_mean[ends].bytes
        received = None
        if own is not None:
            received = own.received
        measured_rows = None
        if not by_group:
            measured_rows = rows.get(plan.flow[target].rows)
        edges.append(
            EdgeAnalysis(
                source,
                target,
                moves=moves,
                rows=Compared(bound.rows, measured_rows, _ROWS),
                most_bytes=bound.bytes if moves else None,
                bytes=Compared(expected_bytes, received, above_only=True),
                unknown=bound.unknown,
                waiting=None if own is None else own.waiting,
            )
        )
    return edges


def _measured_rows(
    plan: Plan, sizes: TableSizes, records: Sequence[Record]
) -> dict[str, float | None]:
    """Return the rows of an average step by the node that made them: prompts, and their samples."""
    found: dict[str, float | None] = {}
    for maker in rows_made(plan, sizes):
        written = ()
        if maker != DATA:
            written = plan.flow[maker].node.contract.writes.names
        if RESPONSE_IDS in written:
            found[maker] = _mean(records, "samples")
        elif maker == DATA or PROMPT_IDS in written:
            found[maker] = _mean(records, "data/prompts")
    return found


def _memory(group: WorkerMemory, measured: Measured) -> MemoryAnalysis:
    most = max(
        (measured.memory[worker] for worker in group.workers if worker in measured.memory),
        default=None,
    )
    return MemoryAnalysis(
        group.workers, tuple(group.roles), Compared(group.total, most, times=1.0, above_only=True)
    )


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [record["metrics"].get(name) for record in records]
    known = [value for value in values if value is not None]
    if known:
        return sum(known) / len(known)
    return None
