"""Decides which rows move: the layout of each node's rows on its workers, and the edges that bring
them there.

Rows that are already on the wanted workers do not move, nor do blobs whose group is there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import EarlyColumns, Edge, Input
from siirl_dask.planner.column import DATA
from siirl_dask.planner.column_flow import NodeColumns
from siirl_dask.planner.contract import Groups
from siirl_dask.planner.hosts import Hosts, by_host
from siirl_dask.planner.node import Node, Rows
from siirl_dask.schema import IDENTITY, MINIBATCH, make_schema
from siirl_dask.wording import steps_behind


@dataclass(frozen=True, slots=True)
class Layout:
    """An assignment of rows to workers. Equal layouts assign every row to the same worker."""

    rows: str
    policy: str
    workers: tuple[str, ...]
    origin: str = ""
    """First node of the layout that these rows came from, where some rows may have stayed; they
    depend on it."""

    @property
    def replicated(self) -> bool:
        return self.policy == Rows.REPLICATED

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers whose parts together hold every row once; for replicas, the first worker."""
        if self.replicated:
            return self.workers[:1]
        return self.workers

    def senders(self, hosts: Hosts) -> tuple[str, ...]:
        """Return the workers that give others its rows; for replicas the first of each host, the
        nearest first.
        """
        if not self.replicated:
            return self.workers
        workers_of_hosts = by_host(self.workers, hosts).values()
        return tuple(workers[0] for workers in workers_of_hosts)

    def is_as(self, policy: str, workers: tuple[str, ...]) -> bool:
        """Return whether rows with this layout satisfy ``policy`` on ``workers``: on a single
        worker they satisfy every policy.
        """
        if self.workers != workers:
            return False
        if self.policy == policy:
            return True
        return len(workers) == 1


def _layout(rows: str, policy: str, workers: tuple[str, ...], origin: str = "") -> Layout:
    if len(workers) == 1:
        return Layout(rows, "whole", workers)
    return Layout(rows, policy, workers, origin)


@dataclass(frozen=True, slots=True)
class Move:
    """A node's input: the tables that it joins, and the edges that bring those that are
    elsewhere.
    """

    inputs: tuple[Input, ...]
    edges: tuple[Edge, ...]
    layout: Layout
    """Layout of the node's output."""
    group_tables: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Tables that have groups of an edge before it is pulled, by the edge's name and the worker
    that has them."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """The layouts of all tables after the nodes planned so far."""

    flow: Mapping[str, NodeColumns]
    hosts: Hosts
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Layout of each node's table."""
    first: dict[Layout, str] = field(default_factory=dict)
    """First node that has each layout."""
    arrived: dict[tuple[str, Layout, bool], Edge] = field(default_factory=dict)
    """Edge that brought a node's rows, or its groups, into a layout; its table can be used
    again."""
    homes: dict[Layout, Layout] = field(default_factory=dict)
    """Layout of rows from which those of a layout were made in place: their groups are on the
    same workers."""

    def brought(
        self,
        source: str,
        layout: Layout,
        columns: Sequence[str],
        *,
        by_group: bool,
    ) -> Edge | None:
        """Return the edge that has brought ``columns`` of a node's table into a layout."""
        edge = self.arrived.get((source, layout, by_group))
        if edge is None or not set(columns) <= set(edge.schema.names):
            return None
        return edge


def plan_moves(
    flow: Mapping[str, NodeColumns], placed: Mapping[str, tuple[str, ...]], hosts: Hosts
) -> dict[str, Move]:
    """Return each node's move. PlanError for a lagged node that cannot be one."""
    planned = _Planned(flow, hosts)
    moves: dict[str, Move] = {}
    for name, node_columns in flow.items():
        node = node_columns.node
        workers = placed[node.role]
        inputs: tuple[Input, ...]
        edges: tuple[Edge, ...] = ()
        if node.after:
            guide = _guide(node_columns, workers, planned.layouts)
            guide_layout = planned.layouts[guide]
            layout = _wanted(node_columns, workers, guide_layout, planned.first[guide_layout])
            inputs, edges = _bring(node_columns, layout, guide, planned)
            group_tables = _tables_with_groups(edges, planned)
            if not node.lag:  # its tables are of an earlier step
                for edge in edges:
                    if edge.moves:
                        planned.arrived[edge.source, layout, edge.by_group] = edge
        else:
            group_tables = {}
            layout = _layout(DATA, "as loaded", workers)
            inputs = (Input(f"{DATA}->{name}", node_columns.needed),)
        output = layout
        if node.contract.new_rows:
            output = _layout(name, "as made", workers)
            if node.contract.groups is Groups.KEPT:
                planned.homes[output] = layout
        planned.layouts[name] = output
        planned.first.setdefault(output, name)
        if node.lag:
            _check_lag(node, inputs, edges)
        moves[name] = Move(inputs, edges, output, group_tables)
    return moves


def _check_lag(node: Node, inputs: Sequence[Input], edges: Sequence[Edge]) -> None:
    """Refuse a lagged node whose input stays on its worker: it is dropped before the later step
    asks for it.
    """
    arriving = {
        edge.name: edge
        for edge in edges
        if edge.moves and set(edge.sources).isdisjoint(edge.targets)
    }
    staying = [item.table for item in inputs if item.table not in arriving]
    if staying:
        raise PlanError(
            f"{node.label} is {steps_behind(node.lag)} and {staying[0]!r} does not leave its "
            "workers: expected its parents on other workers than its own (cluster.placement), or "
            "lag=0 (rollout.max_staleness)"
        )
    if node.stored_as:
        raise PlanError(
            f"{node.label} is {steps_behind(node.lag)} and saves {node.stored_as!r}: save the "
            "output of a node before it (save_as, stage)"
        )


def _guide(
    node_columns: NodeColumns, workers: tuple[str, ...], layouts: Mapping[str, Layout]
) -> str:
    """Return the parent whose rows decide the layout.

    It holds the column ``minibatch`` if the node is balanced by it. A parent whose rows are in
    place comes first, then one on the node's workers.
    """
    if _by_minibatch(node_columns):
        return node_columns.sources[MINIBATCH]
    parents = node_columns.node.after
    for parent in parents:
        if layouts[parent].is_as(_policy(node_columns), workers):
            return parent
    for parent in parents:
        if layouts[parent].workers == workers:
            return parent
    return parents[0]


def _by_minibatch(node_columns: NodeColumns) -> bool:
    if node_columns.node.rows is not Rows.BALANCED:
        return False
    return MINIBATCH in node_columns.needed


def _policy(node_columns: NodeColumns) -> str:
    policy = str(node_columns.node.rows)
    if _by_minibatch(node_columns):
        policy += f" by the minibatch of {node_columns.available[MINIBATCH].writer}"
    return policy


def _wanted(
    node_columns: NodeColumns,
    workers: tuple[str, ...],
    guide: Layout,
    origin: str,
) -> Layout:
    """Return the layout of a node's input. ``origin`` is the first node of the guide's layout."""
    policy = _policy(node_columns)
    if guide.is_as(policy, workers):
        return guide
    if guide.workers == workers and node_columns.node.rows is Rows.ANYWHERE:
        return guide
    if node_columns.node.rows is Rows.REPLICATED or set(guide.workers).isdisjoint(workers):
        origin = ""  # no row stays where it is
    return _layout(node_columns.rows, policy, workers, origin)


def _bring(
    node_columns: NodeColumns,
    layout: Layout,
    guide: str,
    planned: _Planned,
) -> tuple[tuple[Input, ...], tuple[Edge, ...]]:
    """Return the tables that a node joins, and an edge from each source whose rows are not in
    place.

    Sources are its parents, and nodes further above for blobs. A blob that an earlier edge brought
    into the same layout is taken from there.
    """
    sources = dict.fromkeys((*node_columns.node.after, *node_columns.sources.values()))
    inputs: list[Input] = []
    edges: list[Edge] = []
    for source in sources:
        is_in_place = planned.layouts[source] == layout
        by_row: list[str] = []
        by_group: list[str] = []
        for name, provider in node_columns.sources.items():
            if provider != source or name in IDENTITY:
                continue
            if name in node_columns.by_group and not is_in_place:
                by_group.append(name)
            else:
                by_row.append(name)

        columns = (*IDENTITY, *by_row)
        if is_in_place:
            inputs.append(Input(source, columns))
        elif source in node_columns.node.after or by_row:
            brought = None
            if source not in node_columns.node.after:
                brought = planned.brought(source, layout, columns, by_group=False)
            if brought is None:
                edge = _edge(node_columns, source, layout, planned, columns=columns, guide=guide)
                edges.append(replace(edge, early=_early(edge, planned)))
                inputs.append(Input(edge.name, columns))
            else:
                inputs.append(Input(brought.name, columns))

        if by_group:
            columns = (*IDENTITY, *by_group)
            table = _groups_in_place(source, layout, columns, planned)
            if table is None:
                edge = _edge(node_columns, source, layout, planned, columns=columns, guide=guide)
                edge = replace(edge, by_group=True)
                edges.append(edge)
                table = edge.name
            inputs.append(Input(table, columns, by_group=True))
    if edges and planned.layouts[guide] == layout:
        # the guide's rows stay in place, but its statistics decide the owners for the other edges
        edges.append(_edge(node_columns, guide, layout, planned, columns=(), guide=guide))
    return tuple(inputs), tuple(edges)


def _groups_in_place(
    source: str,
    layout: Layout,
    columns: Sequence[str],
    planned: _Planned,
) -> str | None:
    """Return the table with the groups of each worker's rows in ``layout``: the source's, or one
    that an edge brought.

    None where no table is sure to have them.
    """
    home: Layout | None = layout
    while home is not None:
        if planned.layouts[source] == home:
            return source
        for by_group in (True, False):
            edge = planned.brought(source, home, columns, by_group=by_group)
            if edge is not None:
                return edge.name
        home = planned.homes.get(home)
    return None


def _tables_with_groups(
    edges: Sequence[Edge], planned: _Planned
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the tables of a worker that have some groups of an edge, by the edge's name and the
    worker: its own as a source, and those of earlier edges.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for edge in edges:
        if not edge.by_group or edge.rows is Rows.REPLICATED:
            continue
        one_a_group = planned.flow[edge.source].one_a_group
        for worker in edge.targets:
            tables = []
            if worker in edge.sources:
                tables.append(edge.source)
            for earlier in planned.arrived.values():
                if earlier.source != edge.source or worker not in earlier.targets:
                    continue
                if not earlier.by_group and not one_a_group:
                    continue
                if set(edge.schema.names) <= set(earlier.schema.names):
                    tables.append(earlier.name)
            if tables:
                found[edge.name, worker] = tuple(tables)
    return found


def _edge(
    node_columns: NodeColumns,
    source: str,
    layout: Layout,
    planned: _Planned,
    *,
    columns: tuple[str, ...],
    guide: str,
) -> Edge:
    """Return the edge that brings ``columns`` of the table of node ``source`` into ``layout``."""
    produced = planned.flow[source].produced
    schema = make_schema({name: produced[name].type for name in columns})
    target = node_columns.node
    rows = Rows(target.rows)
    if layout.replicated:  # also where the node takes any layout, and its guide's is replicated
        rows = Rows.REPLICATED
    return Edge(
        source,
        target.name,
        sources=planned.layouts[source].senders(planned.hosts),
        targets=layout.workers,
        rows=rows,
        by_minibatch=_by_minibatch(node_columns),
        schema=schema,
        guide=guide,
    )


def _early(edge: Edge, planned: _Planned) -> EarlyColumns | None:
    """Return the columns of an edge that can travel early: those that come unchanged from a node
    that hands over its rows, on the workers that send them. None if there are none.
    """
    if edge.rows is Rows.REPLICATED or not set(edge.sources).isdisjoint(edge.targets):
        return None
    source = planned.flow[edge.source]
    for name, layout in planned.layouts.items():
        maker = planned.flow[name]
        if layout != planned.layouts[edge.source] or maker.rows_out != source.rows_out:
            continue
        unchanged = [
            column
            for column in maker.node.contract.early
            if column in edge.schema.names
            and source.produced[column].writer == maker.produced[column].writer
        ]
        if unchanged:
            return EarlyColumns(name, tuple(unchanged))
    return None
