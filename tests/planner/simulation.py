"""Any DAG on any placement, run by a small executor in one process, and what it would see without a
planner.

Rows go where ``assign_owners`` sends them; a value says who wrote it, from what, so that a wrong
input shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.planner import (
    DAG,
    Chain,
    Drop,
    Edge,
    Groups,
    Input,
    LoadPrompts,
    Node,
    Plan,
    Recv,
    Restore,
    Rows,
    RunNode,
    Save,
    Send,
    Stream,
)
from siirl_dask.schema import IDENTITY
from tests.planner.random_dags import SOURCE

PROMPTS = 9
PART = 2  # rows
AHEAD = 4  # parts
Table = dict[int, dict[str, Any]]
"""Row id -> column -> value; a value says who wrote it, from what."""


def loaded(seed: int) -> Table:
    tokens = random.Random(seed)
    return {
        row: {"row_id": row, "group_id": row, "tokens": tokens.choice((0, 1, 2, 3, 40))}
        | {name: (name, row) for name in SOURCE.names}
        for row in range(PROMPTS)
    }


def lies(row: int, seed: int, count: int) -> int:
    """Return which of the loading workers has the row."""
    return random.Random(seed * PROMPTS + row).randrange(count)


def applied(node: Node, table: Table) -> Table:
    """Return a node's output rows; each value holds all that it was made from, so that a wrong
    input shows.
    """
    contract = node.contract
    result: Table = {}
    for row, values in table.items():
        carried = dict(values) if contract.passes else {name: values[name] for name in IDENTITY}
        for name in contract.writes.names:
            given_to_it = tuple(values[column] for column in contract.reads)
            carried[name] = (
                (node.name, row, given_to_it)
                if name != "minibatch"
                else (row + len(node.name + name)) % 3
            )
        if not contract.new_rows:
            result[row] = carried
            continue
        if contract.passes and contract.expand is None:  # a filter, which may leave nothing
            if (row * 7 + len(node.name + node.role)) % 3:
                result[row] = carried
            continue
        groups = {"group_id": 1000 + 7 * row} if contract.groups is Groups.NEW else {}
        for k in range(2):
            result[2 * row + k] = (
                carried
                | {"row_id": 2 * row + k, "tokens": ((row * 7 + k * 3) % 5 + 1) ** 2}
                | groups
            )
    return result


def of_groups(table: Table, values: Table, names: Sequence[str]) -> Table:
    """Add columns that ``values`` has for each group; where it has several rows of one, all have
    the same.
    """
    found: dict[int, dict[str, Any]] = {}
    for line in values.values():
        own = {name: line[name] for name in names if name not in IDENTITY}
        assert found.setdefault(line["group_id"], own) == own, "rows of a group differ"
    return {row: line | found[line["group_id"]] for row, line in table.items()}


def joined(tables: list[Table]) -> Table:
    rows = set(tables[0])
    assert all(set(table) == rows for table in tables), "a join did not find its rows"
    return {
        row: {name: value for table in tables for name, value in table[row].items()} for row in rows
    }


def without_a_planner(dag: DAG, seed: int) -> dict[str, tuple[Table, Table]]:
    """Each node's input and output, all columns, in one place. Of a column that several parents
    have, what was written last counts.
    """
    done: dict[str, tuple[Table, Table]] = {}
    written: dict[str, dict[str, int]] = {}
    for place, node in enumerate(dag.ordered()):
        writes = {
            name: max(written[p].get(name, -1) for p in node.after)
            for p in node.after
            for name in written[p]
        }
        newest = [
            {
                row: {
                    name: value
                    for name, value in values.items()
                    if written[p].get(name, -1) >= writes.get(name, -1)
                }
                for row, values in done[p][1].items()
            }
            for p in node.after
        ]
        table = joined(newest) if node.after else loaded(seed)
        done[node.name] = (table, applied(node, table))
        carried = writes if node.contract.passes else {}
        written[node.name] = {**carried, **dict.fromkeys(node.contract.writes.names, place)}
    return done


def owners(edge: Edge, parts: Sequence[Table]) -> dict[int, str | None]:
    """Return the owner of each row of the edge's sources; None stands for every worker."""
    lines = sorted(
        (row, values["group_id"], values["tokens"], values.get("minibatch", 0), source)
        for source, part in enumerate(parts)
        for row, values in part.items()
    )
    rows = [line[0] for line in lines]
    # replicas: the first source's count
    if len(parts) > 1 and len(set(rows)) * len(parts) == len(rows):
        lines, rows = lines[:: len(parts)], rows[:: len(parts)]
    assert len(set(rows)) == len(rows), "a row is there twice"
    if edge.rows is Rows.REPLICATED:
        return dict.fromkeys(rows)
    statistics = np.array(lines, np.int64).reshape(-1, 5).T
    owner = assign_owners(edge, EdgeStatistics(*statistics, positions=statistics[0]))
    return {row: edge.targets[index] for row, index in zip(rows, owner.tolist(), strict=True)}


@dataclass
class Cluster:
    """Every node is a collective: no worker of its role runs it before all have come to it."""

    plan: Plan
    seed: int
    stored: Table = field(default_factory=dict)
    """The rows from which a plan of a cut DAG goes on."""
    come: dict[str, set[str]] = field(default_factory=dict)
    published: dict[tuple[str, str], Table] = field(default_factory=dict)
    inputs: dict[str, dict[str, Table]] = field(default_factory=dict)
    kept: dict[str, dict[int, tuple[int, Table]]] = field(default_factory=dict)
    taken: dict[str, set[str]] = field(default_factory=dict)
    """Workers that have a part, by its name."""
    untaken: int = 0
    """Parts of one worker that somebody had yet to take, at most."""
    happened: int = 0

    def run(self) -> None:
        """Round and round over the workers; a Recv waits until all it needs is published."""
        workers = [Worker(chain, self) for chain in self.plan.chains.values()]
        while any(not worker.done for worker in workers):
            assert sum(worker.advance() for worker in workers), "deadlock"
        for worker in workers:
            assert not worker.tables, "a table was never dropped"

    def arrived(self, edge: Edge) -> bool:
        return all((edge.name, source) in self.published for source in edge.sources)

    def all_have_come(self, node: Node) -> bool:
        return self.come.get(node.name, set()) == set(self.plan.placement[node.role])

    def pull_groups(self, edge: Edge, guide: Edge, rows: set[int], have: Sequence[Table]) -> Table:
        """Each group of the rows once: from what the worker has, or from a source."""
        guiding = [self.published[guide.name, source] for source in guide.sources]
        groups = {line["group_id"] for part in guiding for row, line in part.items() if row in rows}
        found: dict[int, tuple[int, dict[str, Any]]] = {}
        for table in [*have, *(self.published[edge.name, source] for source in edge.sources)]:
            for row, line in table.items():
                found.setdefault(
                    line["group_id"], (row, {name: line[name] for name in edge.schema.names})
                )
        assert groups <= set(found), "a group is nowhere"
        return {row: line for group, (row, line) in found.items() if group in groups}

    def pull(self, edge: Edge, guide: Edge, worker: str, have: Sequence[Table] = ()) -> Table:
        owner = owners(guide, [self.published[guide.name, source] for source in guide.sources])
        if edge.by_group:
            return self.pull_groups(
                edge, guide, {row for row, who in owner.items() if who in (None, worker)}, have
            )
        rows = {row: source for source in edge.sources for row in self.published[edge.name, source]}
        parts = [self.published[edge.name, source] for source in edge.sources]
        assert sum(map(len, parts)) == len(rows) or all(len(part) == len(rows) for part in parts), (
            "whole replicas"
        )
        return {
            row: {
                name: self.published[edge.name, rows[row]][row][name] for name in edge.schema.names
            }
            for row, who in owner.items()
            if who in (None, worker)
        }


@dataclass
class Worker:
    chain: Chain
    cluster: Cluster
    position: int = 0
    tables: dict[str, Table] = field(default_factory=dict)
    had: set[str] = field(default_factory=set)
    streaming: Iterator[None] | None = None

    @property
    def done(self) -> bool:
        return self.position == len(self.chain.links)

    def advance(self) -> bool:
        """Run on until a Recv has to wait for rows, or a node for other workers. True if
        anything was done.
        """
        start, came = self.position, False
        happened = self.cluster.happened
        while not self.done:
            link = self.chain.links[self.position]
            if isinstance(link, RunNode):
                come = self.cluster.come.setdefault(link.node.name, set())
                came = came or self.chain.worker not in come
                come.add(self.chain.worker)
                if not self.cluster.all_have_come(link.node):
                    break
            if isinstance(link, Recv) and not (
                self.cluster.arrived(link.edge) and self.cluster.arrived(link.guide)
            ):
                break
            if isinstance(link, Stream):
                self.streaming = self.streaming or self.stream(link)
                if next(self.streaming, "over") != "over":
                    break
                self.streaming = None
            self.follow(link)
            self.position += 1
        return came or self.position > start or self.cluster.happened > happened

    def stream(self, link: Stream) -> Iterator[None]:
        """Both nodes are collectives, the source one for each part. Goes on as far as it can,
        and waits.
        """
        cluster, me, (source, target) = self.cluster, self.chain.worker, (link.source, link.target)
        givers, takers = cluster.plan.placement[source.role], cluster.plan.placement[target.role]
        if link.gives:
            table = self.joined(link.inputs)
            cluster.inputs.setdefault(source.name, {})[me] = table
            made = {
                r: {c: values[c] for c in link.columns}
                for r, values in applied(source, table).items()
            }
            cluster.published[source.name, me] = made
        for number in count():
            stream = f"{source.name}->{target.name}"
            part = f"{stream}/{number}"
            if link.gives:
                before = f"{stream}/{number - AHEAD}"
                while number >= AHEAD and cluster.taken.get(before, set()) != set(takers):
                    yield
                yield from self.meet(part, givers)
                rows = sorted(
                    row for worker in givers for row in cluster.published[source.name, worker]
                )
                here = rows[PART * (number - 1) : PART * number] if number else []
                cluster.published[part, me] = {r: made[r] for r in here if r in made}
                mine = [
                    name
                    for name, worker in cluster.published
                    if worker == me and name.startswith(f"{stream}/")
                ]
                left = sum(cluster.taken.get(name, set()) != set(takers) for name in mine)
                cluster.untaken = max(cluster.untaken, left)
            if link.takes:
                while any((part, worker) not in cluster.published for worker in givers):
                    yield
                parts = [cluster.published[part, worker] for worker in givers]
                assert sum(map(len, parts)) == len({row for rows in parts for row in rows}), (
                    "a row is there twice"
                )
                got = cluster.inputs.setdefault(target.name, {}).setdefault(me, {})
                got.update({row: values for rows in parts for row, values in rows.items()})
                cluster.taken.setdefault(part, set()).add(me)
                cluster.happened += 1
                if number == 0:
                    yield from self.meet(target.name, takers)
            if PART * number >= sum(
                len(cluster.published[source.name, worker]) for worker in givers
            ):
                return

    def meet(self, what: str, workers: Sequence[str]) -> Iterator[None]:
        self.cluster.happened += 1
        self.cluster.come.setdefault(what, set()).add(self.chain.worker)
        while self.cluster.come[what] != set(workers):
            yield

    def add(self, name: str, table: Table) -> None:
        assert name not in self.had, f"{name} was there before"
        self.had.add(name)
        self.tables[name] = table

    def joined(self, inputs: Sequence[Input]) -> Table:
        table = joined(
            [
                {
                    r: {column: values[column] for column in item.columns}
                    for r, values in self.tables[item.table].items()
                }
                for item in inputs
                if not item.by_group
            ]
        )
        for item in inputs:
            table = (
                of_groups(table, self.tables[item.table], item.columns) if item.by_group else table
            )
        return table

    def follow(self, link: object) -> None:
        cluster, worker = self.cluster, self.chain.worker
        match link:
            case LoadPrompts(name, names, index, count):
                rows = {
                    r: values
                    for r, values in loaded(cluster.seed).items()
                    if lies(r, cluster.seed, count) == index
                }
                self.add(
                    name,
                    {
                        row: {column: values[column] for column in names}
                        for row, values in rows.items()
                    },
                )
            case Restore(node, _, schema, index, count):
                rows = sorted(cluster.stored)[index::count]
                self.add(
                    node.name,
                    {
                        r: {column: cluster.stored[r][column] for column in schema.names}
                        for r in rows
                    },
                )
            case RunNode(node, inputs, names):
                table = self.joined(inputs)
                cluster.inputs.setdefault(node.name, {})[worker] = table
                made = applied(node, table)
                self.add(
                    node.name,
                    {r: {column: values[column] for column in names} for r, values in made.items()},
                )
            case Send(edge):
                assert worker in edge.sources
                assert (edge.name, worker) not in cluster.published
                cluster.published[edge.name, worker] = self.tables[edge.source]
            case Recv(edge, guide, have):
                assert worker in edge.targets
                assert guide.target == edge.target
                self.add(
                    edge.name,
                    cluster.pull(edge, guide, worker, [self.tables[name] for name in have]),
                )
            case Save(node, table, index, count):
                parts = cluster.kept.setdefault(table, {})
                assert index not in parts, "two workers write the same part"
                parts[index] = (count, self.tables[node])
            case Drop(table):
                del self.tables[table]
