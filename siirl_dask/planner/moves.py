"""Decides which rows move: the layout of each node's rows on its workers, and the edges that bring them there.

Rows that are already on the wanted workers do not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import Early, Edge, Input
from siirl_dask.planner.column_flow import DATA, Stage
from siirl_dask.planner.explain.tables import steps_behind
from siirl_dask.planner.hosts import Hosts, by_host
from siirl_dask.planner.node import Node, Rows
from siirl_dask.schema import IDENTITY, MINIBATCH, make_schema


@dataclass(frozen=True, slots=True)
class Layout:
    """An assignment of rows to workers. Equal layouts assign every row to the same worker."""

    rows: str
    policy: str
    workers: tuple[str, ...]
    origin: str = ""
    """First node of the layout that these rows came from, where some rows may have stayed; they depend on it."""

    @property
    def replicated(self) -> bool:
        return self.policy == Rows.REPLICATED

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers whose parts together hold every row once; for replicas, the first worker."""
        return self.workers[:1] if self.replicated else self.workers

    def senders(self, hosts: Hosts) -> tuple[str, ...]:
        """Return the workers that give others its rows; for replicas the first of each host, the nearest first."""
        return tuple(own[0] for own in by_host(self.workers, hosts).values()) if self.replicated else self.workers

    def is_as(self, policy: str, workers: tuple[str, ...]) -> bool:
        """Tell whether rows with this layout satisfy ``policy`` on ``workers``; rows that are balanced stay so."""
        return self.workers == workers and (self.policy == policy or len(workers) == 1)


def _layout(rows: str, policy: str, workers: tuple[str, ...], origin: str = "") -> Layout:
    return Layout(rows, policy, workers, origin) if len(workers) > 1 else Layout(rows, "whole", workers)


@dataclass(frozen=True, slots=True)
class Move:
    """A node's input: the tables that it joins, and the edges that bring those that are elsewhere."""

    inputs: tuple[Input, ...]
    edges: tuple[Edge, ...]
    layout: Layout
    """Layout of the node's output."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """The layouts of all tables after the nodes planned so far."""

    stages: Mapping[str, Stage]
    hosts: Hosts
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Layout of each node's table."""
    first: dict[Layout, str] = field(default_factory=dict)
    """First node that has each layout."""
    arrived: dict[tuple[str, Layout], Edge] = field(default_factory=dict)
    """Edge that brought a node's rows into a layout; its table can be used again."""


def plan_moves(stages: Mapping[str, Stage], placed: Mapping[str, tuple[str, ...]], hosts: Hosts) -> dict[str, Move]:
    """Return each node's move. PlanError for a lagged node that cannot be one."""
    planned = _Planned(stages, hosts)
    moves: dict[str, Move] = {}
    for name, stage in stages.items():
        node, workers = stage.node, placed[stage.node.role]
        if node.after:
            guide = _guide(stage, workers, planned.layouts)
            layout = _wanted(stage, workers, planned.layouts[guide], planned.first[planned.layouts[guide]])
            inputs, edges = _bring(stage, layout, guide, planned)
            planned.arrived.update({(edge.source, layout): edge for edge in edges if edge.moves})
        else:
            layout = _layout(DATA, "as loaded", workers)
            inputs, edges = (Input(f"{DATA}->{name}", stage.needed),), ()
        planned.layouts[name] = _layout(name, "as made", workers) if node.contract.new_rows else layout
        planned.first.setdefault(planned.layouts[name], name)
        if node.lag:
            _check_lag(node, inputs, edges)
        moves[name] = Move(inputs, edges, planned.layouts[name])
    return moves


def _check_lag(node: Node, inputs: Sequence[Input], edges: Sequence[Edge]) -> None:
    """Refuse a lagged node whose input stays on its worker: it is dropped before the later step asks for it."""
    arriving = {edge.name: edge for edge in edges if edge.moves and set(edge.sources).isdisjoint(edge.targets)}
    if staying := [item.table for item in inputs if item.table not in arriving]:
        raise PlanError(
            f"{node.label} is {steps_behind(node.lag)} and {staying[0]!r} does not leave its workers: expected its "
            "parents on other workers than its own (cluster.placement), or lag=0 (rollout.max_staleness)"
        )
    if node.stored_as:
        raise PlanError(
            f"{node.label} is {steps_behind(node.lag)} and saves {node.stored_as!r}: save the output of a node before "
            "it (save_as, stage)"
        )


def _guide(stage: Stage, workers: tuple[str, ...], layouts: Mapping[str, Layout]) -> str:
    """Return the parent whose rows decide the layout.

    It holds the column ``minibatch`` if the node is balanced by it. A parent whose rows are in place comes first, then
    one on the node's workers.
    """
    parents = (stage.sources[MINIBATCH],) if _by_minibatch(stage) else stage.node.after
    in_place = (parent for parent in parents if layouts[parent].is_as(_policy(stage), workers))
    here = (parent for parent in parents if layouts[parent].workers == workers)
    return next(in_place, None) or next(here, parents[0])


def _by_minibatch(stage: Stage) -> bool:
    return stage.node.rows is Rows.BALANCED and MINIBATCH in stage.needed


def _policy(stage: Stage) -> str:
    by = f" by the minibatch of {stage.available[MINIBATCH].writer}" if _by_minibatch(stage) else ""
    return f"{stage.node.rows}{by}"


def _wanted(stage: Stage, workers: tuple[str, ...], guide: Layout, origin: str) -> Layout:
    """Return the layout of a node's input. ``origin`` is the first node of the guide's layout."""
    policy = _policy(stage)
    if guide.is_as(policy, workers) or (guide.workers == workers and stage.node.rows is Rows.ANYWHERE):
        return guide
    some_stay = stage.node.rows is not Rows.REPLICATED and not set(guide.workers).isdisjoint(workers)
    return _layout(stage.rows, policy, workers, origin if some_stay else "")


def _bring(stage: Stage, layout: Layout, guide: str, planned: _Planned) -> tuple[tuple[Input, ...], tuple[Edge, ...]]:
    """Return the tables that a node joins, and an edge from each source whose rows are not in place.

    Sources are its parents, and nodes further above for blobs. A blob that an earlier edge brought into the same layout
    is taken from there.
    """
    sources = dict.fromkeys((*stage.node.after, *stage.sources.values()))
    in_place = {source for source in sources if planned.layouts[source] == layout}
    inputs, edges = [], []
    for source in sources:
        taken = (name for name, provider in stage.sources.items() if provider == source and name not in IDENTITY)
        columns = (*IDENTITY, *taken)
        senders = planned.layouts[source].senders(planned.hosts)
        edge = _edge(stage, planned.stages[source], senders, layout, columns, guide)
        edge = replace(edge, early=_early(edge, planned))
        arrived = planned.arrived.get((source, layout))
        if source in in_place:
            inputs.append(Input(source, columns))
        elif source not in stage.node.after and arrived and set(columns) <= set(arrived.schema.names):
            inputs.append(Input(arrived.name, columns))
        else:
            inputs.append(Input(edge.name, columns))
            edges.append(edge)
    if edges and guide in in_place:
        senders = planned.layouts[guide].senders(planned.hosts)
        edges.append(_edge(stage, planned.stages[guide], senders, layout, (), guide))
    return tuple(inputs), tuple(edges)


def _edge(
    stage: Stage,
    source: Stage,
    sources: tuple[str, ...],
    layout: Layout,
    columns: tuple[str, ...],
    guide: str,
) -> Edge:
    schema = make_schema({name: source.produced[name].type for name in columns})
    target = stage.node
    rows = Rows.REPLICATED if layout.replicated else Rows(target.rows)  # where the guide is in place and replicated
    return Edge(source.node.name, target.name, sources, layout.workers, rows, _by_minibatch(stage), schema, guide)


def _early(edge: Edge, planned: _Planned) -> Early | None:
    """Return what of an edge can travel early: columns that come unchanged from a node which hands over its rows, on
    the workers that send them.
    """
    if edge.rows is Rows.REPLICATED or not set(edge.sources).isdisjoint(edge.targets):
        return None
    source = planned.stages[edge.source]
    for name, layout in planned.layouts.items():
        maker = planned.stages[name]
        if layout != planned.layouts[edge.source] or maker.rows_out != source.rows_out:
            continue
        unchanged = (
            column
            for column in maker.node.contract.early
            if column in edge.schema.names and source.produced[column].writer == maker.produced[column].writer
        )
        if columns := tuple(unchanged):
            return Early(name, columns)
    return None
