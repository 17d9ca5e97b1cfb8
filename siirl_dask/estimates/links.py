"""Estimates the bytes that a plan moves from host to host in a step, by laying out rows as the
workers would.

Each edge's rows go to the owners that ``assign_owners`` gives them, all of one length: their
longest. Rows that are replicated, weights above all, go to each other host once. Statistics, acks
and the like are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.planner import (
    Edge,
    NodeColumns,
    Plan,
    Rows,
    TableSizes,
    by_host,
    host_of,
    times_of,
    travelling_bytes,
)
from siirl_dask.tables import Ints, split

Links = Mapping[tuple[str, str], int]
"""Bytes by (sending host, receiving host)."""


@dataclass(frozen=True, slots=True)
class EdgeLinks:
    """The bytes that an edge moves between hosts in a step."""

    edge: Edge
    bytes: Links
    unknown: tuple[str, ...] = ()
    """Columns whose size has no bound, which are not counted."""
    counted: bool = True
    """False where nothing bounds the number of rows."""


def links_of(plan: Plan, sizes: TableSizes) -> list[EdgeLinks]:
    """Return the bytes that each edge that moves rows moves between hosts."""
    return list(_Layouts(plan, sizes).links.values())


def total_of(links: list[EdgeLinks]) -> Links:
    """Return the bytes of all edges together."""
    total = Counter[tuple[str, str]]()
    for edge in links:
        total.update(edge.bytes)
    return dict(sorted(total.items()))


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of a node, and the worker that has each."""

    rows: EdgeStatistics
    workers: Ints | None
    """[rows] index of a worker of the plan; None where the node's workers have all rows."""


class _Layouts:
    """Lays out one step's rows, node by node."""

    def __init__(self, plan: Plan, sizes: TableSizes) -> None:
        self._plan = plan
        self._sizes = sizes
        self._names = list(plan.chains)
        self._number = {worker: number for number, worker in enumerate(self._names)}
        self._longest = max(len(worker.encode()) for worker in self._names)
        self._tables: dict[str, _Table | None] = {}  # None: nothing bounds its rows
        self.links: dict[str, EdgeLinks] = {}
        edges_to: dict[str, list[Edge]] = {name: [] for name in plan.flow}
        for edge in plan.edges:
            edges_to[edge.target].append(edge)
        for name, node_columns in plan.flow.items():
            self._tables[name] = self._output(
                node_columns, self._input(node_columns, edges_to[name])
            )

    def _input(self, node_columns: NodeColumns, edges: list[Edge]) -> _Table | None:
        """Return a node's input on the node's workers, and count the bytes that this moves."""
        node = node_columns.node
        if not node.after:
            return self._loaded(node_columns)
        if not edges:
            return self._tables[node.after[0]]
        guide = next(edge for edge in edges if edge.source == edge.guide and not edge.by_group)
        guiding = self._tables[guide.source]
        owners: Ints | None = None
        if guiding is not None and guide.rows is not Rows.REPLICATED:
            statistics = self._with_sources(guide, guiding)
            assigned = assign_owners(
                guide, statistics, self._sizes.quadratic_from, self._plan.hosts
            )
            owners = np.array([self._number[target] for target in guide.targets])[assigned]
        for edge in edges:
            if edge.moves and edge.by_group:
                self.links[edge.name] = self._count_groups(edge, guiding, owners)
            elif edge.moves:
                self.links[edge.name] = self._count(edge, self._tables[edge.source], owners)
        if guiding is None:
            return None
        return replace(guiding, workers=owners)

    def _loaded(self, node_columns: NodeColumns) -> _Table:
        """Return the step's prompts, in equal parts on the workers that load them."""
        prompts = self._sizes.prompts
        workers = self._plan.placement[node_columns.node.role]
        parts = []
        for worker, (start, stop) in zip(workers, split(prompts, len(workers)), strict=True):
            parts.append(np.full(stop - start, self._number[worker]))
        ids = np.arange(prompts)
        return _Table(self._rows(ids, ids, self._sizes.prompt_tokens), np.concatenate(parts))

    def _output(self, node_columns: NodeColumns, table: _Table | None) -> _Table | None:
        """Return a node's output."""
        if table is None or not node_columns.node.contract.new_rows:
            return table
        times = times_of(node_columns.node)
        if times is None or node_columns.node.name in self._sizes.totals:
            return None
        ids = table.rows.row_ids
        if times > 1:
            ids = (ids[:, None] * times + np.arange(times)).ravel()
        tokens = self._sizes.prompt_tokens + self._sizes.response_tokens
        rows = self._rows(ids, np.repeat(table.rows.groups, times), tokens)
        return _Table(rows, None if table.workers is None else np.repeat(table.workers, times))

    def _rows(self, ids: Ints, groups: Ints, tokens: int) -> EdgeStatistics:
        """Return rows of one length, drawn into mini-batches by group as ``draw_minibatches``
        does.
        """
        count = int(groups.max(initial=-1)) + 1
        order = np.random.default_rng(0).permutation(count)
        zeros = np.zeros(len(ids), np.int64)
        return EdgeStatistics(
            row_ids=ids,
            groups=groups,
            tokens=np.full(len(ids), tokens),
            minibatches=order[groups] * self._sizes.minibatches // max(count, 1),
            sources=zeros,
            positions=zeros,
        )

    def _with_sources(self, edge: Edge, table: _Table) -> EdgeStatistics:
        """Return the rows with the source of an edge that has each."""
        if table.workers is None:
            return table.rows
        source = np.zeros(len(self._names), np.int64)
        source[[self._number[worker] for worker in edge.sources]] = np.arange(len(edge.sources))
        return replace(table.rows, sources=source[table.workers])

    def _count(self, edge: Edge, table: _Table | None, owners: Ints | None) -> EdgeLinks:
        """Return the bytes that an edge moves between hosts, to the ``owners`` of its rows or to
        all of its targets.
        """
        total = self._sizes.totals.get(edge.source)
        if total is not None:
            return EdgeLinks(
                edge, self._replicated(edge, dict.fromkeys(edge.sources, total / len(edge.sources)))
            )
        if table is None:
            return EdgeLinks(edge, {}, counted=False)
        each, unknown = travelling_bytes(edge.schema, self._sizes, self._longest)
        hosts_with_all: set[str] = set()
        locations = table.workers
        if locations is None:
            hosts_with_all = {host_of(source, self._plan.hosts) for source in edge.sources}
            locations = np.full(len(table.rows.row_ids), self._number[edge.sources[0]])
        if owners is None:
            counts = Counter(locations.tolist())
            held = {self._names[worker]: float(count * each) for worker, count in counts.items()}
            return EdgeLinks(edge, self._replicated(edge, held, hosts_with_all), unknown)
        pairs = Counter(zip(locations.tolist(), owners.tolist(), strict=True))
        links = Counter[tuple[str, str]]()
        for (source, target), count in pairs.items():
            sender = host_of(self._names[source], self._plan.hosts)
            receiver = host_of(self._names[target], self._plan.hosts)
            if sender != receiver and receiver not in hosts_with_all:
                links[sender, receiver] += count * each
        return EdgeLinks(edge, links, unknown)

    def _count_groups(self, edge: Edge, guiding: _Table | None, owners: Ints | None) -> EdgeLinks:
        """Return the bytes that an edge by group moves: each group once to every worker that
        owns a row of it.
        """
        table = self._tables[edge.source]
        if table is None or guiding is None:
            return EdgeLinks(edge, {}, counted=False)
        groups, first = np.unique(table.rows.groups, return_index=True)
        if table.workers is None:
            locations = np.full(len(first), self._number[edge.sources[0]])
        else:
            locations = table.workers[first]
        if owners is None:
            return self._count(edge, _Table(self._rows(groups, groups, 0), locations), None)
        indices, group_owners = np.unique(
            np.stack([np.searchsorted(groups, guiding.rows.groups), owners]), axis=1
        )
        ids = groups[indices]
        return self._count(edge, _Table(self._rows(ids, ids, 0), locations[indices]), group_owners)

    def _replicated(
        self,
        edge: Edge,
        held: Mapping[str, float],
        hosts_with_all: Collection[str] = (),
    ) -> Links:
        """Return the links of rows that go to every target.

        ``held`` are the bytes that each source has, ``hosts_with_all`` the hosts that have all rows
        already.
        """
        links = Counter[tuple[str, str]]()
        for host in by_host(edge.targets, self._plan.hosts):
            for source, workers in by_host(held, self._plan.hosts).items():
                if source != host and host not in hosts_with_all:
                    links[source, host] += round(sum(held[worker] for worker in workers))
        return links
