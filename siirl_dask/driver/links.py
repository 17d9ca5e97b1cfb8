"""Estimates the bytes that a plan moves from host to host in a step, by laying out rows as the workers would.

Each edge's rows go to the owners that ``assign_owners`` gives them, all of one length: their longest. Rows that are
replicated, weights above all, go to each other host once. Statistics, acks and the like are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.coordinator.layout.balance import Ints, split
from siirl_dask.planner import Edge, Plan, Rows, Sizes, Stage
from siirl_dask.planner.explain.sizes import times_of, travelling_bytes
from siirl_dask.planner.hosts import by_host, host_of

Links = Mapping[tuple[str, str], int]
"""Bytes by (host that sends, host that receives)."""


@dataclass(frozen=True, slots=True)
class EdgeLinks:
    """The bytes that an edge moves between hosts in a step."""

    edge: Edge
    bytes: Links
    unknown: tuple[str, ...] = ()
    """Columns whose size has no bound, which are not counted."""
    counted: bool = True
    """False where nothing bounds the number of rows."""


def links_of(plan: Plan, sizes: Sizes) -> list[EdgeLinks]:
    """Return what each edge that moves rows moves between hosts."""
    return list(_Layouts(plan, sizes).links.values())


def total_of(links: list[EdgeLinks]) -> Links:
    """Return the bytes of all edges together."""
    total = Counter[tuple[str, str]]()
    for one in links:
        total.update(one.bytes)
    return dict(sorted(total.items()))


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of a node, and the worker that has each."""

    rows: EdgeStatistics
    workers: Ints | None
    """[rows] index of a worker of the plan; None where the node's workers have all rows."""


class _Layouts:
    """Lays out one step's rows, node by node."""

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self._plan, self._sizes = plan, sizes
        self._names = list(plan.chains)
        self._number = {worker: number for number, worker in enumerate(self._names)}
        self._longest = max(len(worker.encode()) for worker in self._names)
        self._tables: dict[str, _Table | None] = {}  # None: nothing bounds its rows
        self.links: dict[str, EdgeLinks] = {}
        into: dict[str, list[Edge]] = {name: [] for name in plan.stages}
        for edge in plan.edges:
            into[edge.target].append(edge)
        for name, stage in plan.stages.items():
            self._tables[name] = self._made(stage, self._arriving(stage, into[name]))

    def _arriving(self, stage: Stage, edges: list[Edge]) -> _Table | None:
        """Return a node's input where it is wanted, and count what that moves."""
        node = stage.node
        if not node.after:
            return self._loaded(stage)
        if not edges:
            return self._tables[node.after[0]]
        guide = next(edge for edge in edges if edge.source == edge.guide and not edge.by_group)
        guiding = self._tables[guide.source]
        owners: Ints | None = None
        if guiding is not None and guide.rows is not Rows.REPLICATED:
            chosen = assign_owners(guide, self._seen(guide, guiding), self._sizes.quadratic_from, self._plan.hosts)
            owners = np.array([self._number[target] for target in guide.targets])[chosen]
        for edge in edges:
            if edge.moves and edge.by_group:
                self.links[edge.name] = self._count_groups(edge, guiding, owners)
            elif edge.moves:
                self.links[edge.name] = self._count(edge, self._tables[edge.source], owners)
        return None if guiding is None else replace(guiding, workers=owners)

    def _loaded(self, stage: Stage) -> _Table:
        """Return the step's prompts, in equal parts on the workers that load them."""
        prompts, workers = self._sizes.prompts, self._plan.placement[stage.node.role]
        ids = np.arange(prompts)
        lying = np.concatenate(
            [
                np.full(stop - start, self._number[worker])
                for worker, (start, stop) in zip(workers, split(prompts, len(workers)), strict=True)
            ]
        )
        return _Table(self._rows(ids, ids, self._sizes.prompt_tokens), lying)

    def _made(self, stage: Stage, table: _Table | None) -> _Table | None:
        """Return a node's output."""
        if table is None or not stage.node.contract.new_rows:
            return table
        times = times_of(stage.node)
        if times is None or stage.node.name in self._sizes.totals:
            return None
        ids = (table.rows.row_ids[:, None] * times + np.arange(times)).ravel() if times > 1 else table.rows.row_ids
        tokens = self._sizes.prompt_tokens + self._sizes.response_tokens
        rows = self._rows(ids, np.repeat(table.rows.groups, times), tokens)
        return _Table(rows, None if table.workers is None else np.repeat(table.workers, times))

    def _rows(self, ids: Ints, groups: Ints, tokens: int) -> EdgeStatistics:
        """Return rows of one length, drawn into mini-batches by group as ``draw_minibatches`` does."""
        count, nothing = int(groups.max(initial=-1)) + 1, np.zeros(len(ids), np.int64)
        order = np.random.default_rng(0).permutation(count)
        drawn = order[groups] * self._sizes.minibatches // max(count, 1)
        return EdgeStatistics(ids, groups, np.full(len(ids), tokens), drawn, nothing, nothing)

    def _seen(self, edge: Edge, table: _Table) -> EdgeStatistics:
        """Return rows with the sources of an edge that have them."""
        if table.workers is None:
            return table.rows
        source = np.zeros(len(self._names), np.int64)
        source[[self._number[worker] for worker in edge.sources]] = np.arange(len(edge.sources))
        return replace(table.rows, sources=source[table.workers])

    def _count(self, edge: Edge, table: _Table | None, owners: Ints | None) -> EdgeLinks:
        """Return what an edge moves between hosts, to the ``owners`` of its rows or to all of its targets."""
        total = self._sizes.totals.get(edge.source)
        if total is not None:
            return EdgeLinks(edge, self._replicated(edge, dict.fromkeys(edge.sources, total / len(edge.sources))))
        if table is None:
            return EdgeLinks(edge, {}, counted=False)
        each, unknown = travelling_bytes(edge.schema, self._sizes, self._longest)
        lying = np.full(len(table.rows.row_ids), self._number[edge.sources[0]])
        lying = lying if table.workers is None else table.workers
        near = {host_of(source, self._plan.hosts) for source in edge.sources if table.workers is None}
        if owners is None:
            counts = Counter(lying.tolist())
            held = {self._names[worker]: float(count * each) for worker, count in counts.items()}
            return EdgeLinks(edge, self._replicated(edge, held, near), unknown)
        pairs = Counter(zip(lying.tolist(), owners.tolist(), strict=True))
        links = Counter[tuple[str, str]]()
        for (source, target), count in pairs.items():
            ends = (host_of(self._names[source], self._plan.hosts), host_of(self._names[target], self._plan.hosts))
            if ends[0] != ends[1] and ends[1] not in near:
                links[ends] += count * each
        return EdgeLinks(edge, links, unknown)

    def _count_groups(self, edge: Edge, guiding: _Table | None, owners: Ints | None) -> EdgeLinks:
        """Return what an edge by group moves: each group once to every worker that owns a row of it."""
        table = self._tables[edge.source]
        if table is None or guiding is None:
            return EdgeLinks(edge, {}, counted=False)
        groups, first = np.unique(table.rows.groups, return_index=True)
        places = np.full(len(first), self._number[edge.sources[0]]) if table.workers is None else table.workers[first]
        lying = _Table(self._rows(groups, groups, 0), places)
        if owners is None:
            return self._count(edge, lying, None)
        pairs = np.unique(np.stack([np.searchsorted(groups, guiding.rows.groups), owners]), axis=1)
        return self._count(edge, _Table(self._rows(groups[pairs[0]], groups[pairs[0]], 0), places[pairs[0]]), pairs[1])

    def _replicated(self, edge: Edge, held: Mapping[str, float], near: Collection[str] = ()) -> Links:
        """Return the links of rows that go to every target; ``held`` are the bytes that each source has, ``near`` the
        hosts that have all rows already.
        """
        links = Counter[tuple[str, str]]()
        for host in by_host(edge.targets, self._plan.hosts):
            for source, those in by_host(held, self._plan.hosts).items():
                if source != host and host not in near:
                    links[source, host] += round(sum(held[worker] for worker in those))
        return links
