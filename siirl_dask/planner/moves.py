"""Decides which rows move: the layout of each node's rows on its workers, and the edges that bring them there.

Rows that are already on the wanted workers do not move, nor do blobs whose group is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import Early, Edge, Input
from siirl_dask.planner.column_flow import DATA, Stage
from siirl_dask.planner.contract import Groups
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
    have: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Tables that have groups of an edge before it is pulled, by the edge's name and the worker that has them."""

    def here(self, edge: Edge, worker: str) -> tuple[str, ...]:
        """Return the tables of a worker that have groups of an edge already."""
        return self.have.get((edge.name, worker), ())


@dataclass(frozen=True, slots=True)
class _Planned:
    """The layouts of all tables after the nodes planned so far."""

    stages: Mapping[str, Stage]
    hosts: Hosts
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Layout of each node's table."""
    first: dict[Layout, str] = field(default_factory=dict)
    """First node that has each layout."""
    arrived: dict[tuple[str, Layout, bool], Edge] = field(default_factory=dict)
    """Edge that brought a node's rows, or its groups, into a layout; its table can be used again."""
    homes: dict[Layout, Layout] = field(default_factory=dict)
    """Layout of rows from which those of a layout were made in place: their groups are on the same workers."""

    def with_groups_of(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layouts in which each worker has all groups that it has in ``layout``, and that one first."""
        home: Layout | None = layout
        while home is not None:
            yield home
            home = self.homes.get(home)

    def brought(self, source: str, layout: Layout, columns: Sequence[str], *, by_group: bool) -> Edge | None:
        """Return the edge that has brought ``columns`` of a node's table into a layout."""
        edge = self.arrived.get((source, layout, by_group))
        return edge if edge is not None and set(columns) <= set(edge.schema.names) else None


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
            have = {
                (edge.name, worker): tables
                for edge in edges
                for worker in edge.targets
                if (tables := _groups_here(edge, worker, planned))
            }
            if not node.lag:  # its tables are of an earlier step
                planned.arrived.update({(edge.source, layout, edge.by_group): edge for edge in edges if edge.moves})
        else:
            layout, have = _layout(DATA, "as loaded", workers), {}
            inputs, edges = (Input(f"{DATA}->{name}", stage.needed),), ()
        planned.layouts[name] = _layout(name, "as made", workers) if node.contract.new_rows else layout
        if node.contract.new_rows and node.contract.groups is Groups.KEPT:
            planned.homes[planned.layouts[name]] = layout
        planned.first.setdefault(planned.layouts[name], name)
        if node.lag:
            _check_lag(node, inputs, edges)
        moves[name] = Move(inputs, edges, planned.layouts[name], have)
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
        taken = [name for name, provider in stage.sources.items() if provider == source and name not in IDENTITY]
        by_group = [] if source in in_place else [name for name in taken if name in stage.by_group]
        by_row = [name for name in taken if name not in by_group]
        columns = (*IDENTITY, *by_row)
        senders = planned.layouts[source].senders(planned.hosts)
        parent = source in stage.node.after
        if source in in_place:
            inputs.append(Input(source, columns))
        elif not parent and (arrived := planned.brought(source, layout, columns, by_group=False)):
            inputs += [Input(arrived.name, columns)] if by_row else []
        elif parent or by_row:
            edge = _edge(stage, planned.stages[source], senders, layout, columns, guide)
            inputs.append(Input(edge.name, columns))
            edges.append(replace(edge, early=_early(edge, planned)))
        if by_group:
            columns = (*IDENTITY, *by_group)
            table = _groups_in_place(source, layout, columns, planned)
            if table is None:
                edge = _edge(stage, planned.stages[source], senders, layout, columns, guide)
                edges.append(replace(edge, by_group=True))
                table = edges[-1].name
            inputs.append(Input(table, columns, by_group=True))
    if edges and guide in in_place:
        senders = planned.layouts[guide].senders(planned.hosts)
        edges.append(_edge(stage, planned.stages[guide], senders, layout, (), guide))
    return tuple(inputs), tuple(edges)


def _groups_in_place(source: str, layout: Layout, columns: Sequence[str], planned: _Planned) -> str | None:
    """Return the table with the groups of each worker's rows in ``layout``: the source's, or one that an edge brought.

    None where no table is sure to have them.
    """
    for home in planned.with_groups_of(layout):
        if planned.layouts[source] == home:
            return source
        for by_group in (True, False):
            if edge := planned.brought(source, home, columns, by_group=by_group):
                return edge.name
    return None


def _groups_here(edge: Edge, worker: str, planned: _Planned) -> tuple[str, ...]:
    """Return the tables of a worker that have some groups of an edge: its own as a source, and what came earlier."""
    if not edge.by_group or edge.rows is Rows.REPLICATED:
        return ()
    one_a_group = planned.stages[edge.source].one_a_group
    came = [
        earlier.name
        for earlier in planned.arrived.values()
        if earlier.source == edge.source
        and worker in earlier.targets
        and (earlier.by_group or one_a_group)
        and set(edge.schema.names) <= set(earlier.schema.names)
    ]
    return (*([edge.source] if worker in edge.sources else []), *came)


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
