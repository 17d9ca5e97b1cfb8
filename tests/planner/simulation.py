"""Any DAG on any placement, run by a small executor in one process, and what it would see without a planner.

Rows go where ``assign`` sends them; a value says who wrote it, from what, so that a wrong input shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import assume
from hypothesis import strategies as st

from siirl_dask.coordinator.statistics import Statistics, assign
from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Chain,
    Drop,
    Edge,
    Keep,
    Load,
    Node,
    Plan,
    Recv,
    Role,
    Rows,
    Run,
    Send,
    columns,
    compile_chains,
)
from siirl_dask.schema import IDENTITY

SOURCE = pa.schema({"d0": pa.int64(), "d1": pa.int64(), "d2": pa.binary()})
PROMPTS = 9
Table = dict[int, dict[str, Any]]
"""Row id -> column -> value; a value says who wrote it, from what."""


def build(device, rank): ...


@columns(optional=["c0", "c3"])
def same_rows(ctx, table): ...


@columns(passes=False)
def narrow(ctx, table): ...


@columns(expand="n")
def more_rows(ctx, table, *, n: int = 2): ...


@columns(new_rows=True, passes=False)
def other_rows(ctx, table): ...


ROLES = ("a", "b", "c")


@st.composite
def dags(draw: st.DrawFn) -> DAG:
    nodes: list[Node] = []
    made_by: dict[str, str] = {}  # whose rows come out of a node
    seen: dict[str, set[str]] = {}
    everywhere: set[str] = set()  # nodes whose rows may be on every worker
    for i in range(draw(st.integers(1, 9))):
        name = f"n{i}"
        first = draw(st.sampled_from([None, *made_by])) if made_by else None
        alike = [parent for parent in made_by if first is not None and made_by[parent] == made_by[first]]
        after = tuple(draw(st.permutations(alike))[: draw(st.integers(1, 3))]) if alike else ()
        rows = draw(st.sampled_from(list(Rows))) if after else Rows.ANYWHERE
        replicated = rows is Rows.REPLICATED or (rows is Rows.ANYWHERE and not everywhere.isdisjoint(after))
        # what is new of rows that are everywhere would be there twice
        fn = draw(st.sampled_from([same_rows, same_rows, narrow, *([] if replicated else [more_rows, other_rows])]))
        available = set(SOURCE.names).union(*(seen[parent] for parent in after)) if not after else set()
        available = available.union(*(seen[parent] for parent in after))
        reads = draw(st.lists(st.sampled_from(sorted(available)), unique=True, max_size=3)) if available else []
        written = {f"c{i}": draw(st.sampled_from([pa.int64(), pa.binary()]))} if draw(st.booleans()) else {}
        written |= {"minibatch": pa.int64()} if draw(st.integers(0, 3)) == 0 else {}
        keep = f"table{i}" if draw(st.integers(0, 3)) == 0 else None
        schema = pa.schema(written)
        nodes.append(Node(name, fn, draw(st.sampled_from(ROLES)), after, rows, keep, tuple(reads), schema))
        made_by[name] = name if fn in (more_rows, other_rows) else made_by[after[0]] if after else ""
        seen[name] = (available if fn in (same_rows, more_rows) else set()) | set(written)
        if replicated and fn in (same_rows, narrow):
            everywhere.add(name)
    return DAG([Role(role, build) for role in ROLES], nodes)


@st.composite
def joins(draw: st.DrawFn) -> DAG:
    """Branches that lay the same rows out by the same policy, each from where another branch had them, and a join."""
    policies = st.sampled_from([Rows.ANYWHERE, Rows.GROUPED, Rows.BALANCED])
    alike, reads = draw(policies), draw(st.sampled_from([(), ("minibatch",)]))
    nodes = [Node("x", same_rows, "a", writes=pa.schema({"minibatch": pa.int64(), "blob": pa.binary()}))]
    for i in range(draw(st.integers(1, 3))):
        before = draw(st.sampled_from([node.name for node in nodes]))
        nodes.append(Node(f"y{i}", same_rows, draw(st.sampled_from(ROLES)), (before,), draw(policies)))
    for i, before in enumerate(draw(st.permutations([node.name for node in nodes]))[:3]):
        nodes.append(Node(f"alike{i}", same_rows, "c", (before,), alike, reads=reads))
    after = tuple(node.name for node in nodes if node.name.startswith("alike"))
    nodes.append(Node("join", same_rows, "c", after, draw(st.sampled_from([alike, Rows.ANYWHERE])), reads=("blob",)))
    return DAG([Role(role, build) for role in ROLES], nodes)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dag, count = draw(dags() | joins()), draw(st.integers(1, 4))
    placement = {
        role: draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
        for role in ROLES
        if draw(st.booleans())
    }
    try:
        return compile_chains(dag, [f"w{i}" for i in range(count)], SOURCE, placement)
    except PlanError as error:  # two branches wrote a column of one name
        assume("joins two columns" not in str(error))
        raise


def loaded(seed: int) -> Table:
    tokens = random.Random(seed)
    return {
        row: {"row_id": row, "group_id": row // 2, "tokens": tokens.choice((0, 1, 2, 3, 40))}
        | {name: (name, row) for name in SOURCE.names}
        for row in range(PROMPTS)
    }


def lies(row: int, seed: int, count: int) -> int:
    """Which of the workers that load has the row."""
    return random.Random(seed * PROMPTS + row).randrange(count)


def applied(node: Node, table: Table) -> Table:
    """What a node makes of its rows: each value holds all it was made from, so a wrong input shows."""
    contract = node.contract
    result: Table = {}
    for row, values in table.items():
        carried = dict(values) if contract.passes else {name: values[name] for name in IDENTITY}
        for name in contract.writes.names:
            given_to_it = tuple(values[column] for column in contract.reads)
            carried[name] = (node.name, row, given_to_it) if name != "minibatch" else (row + len(node.name + name)) % 3
        if not contract.new_rows:
            result[row] = carried
            continue
        for k in range(2):
            result[2 * row + k] = carried | {"row_id": 2 * row + k, "tokens": ((row * 7 + k * 3) % 5 + 1) ** 2}
    return result


def joined(tables: list[Table]) -> Table:
    rows = set(tables[0])
    assert all(set(table) == rows for table in tables), "a join did not find its rows"
    return {row: {name: value for table in tables for name, value in table[row].items()} for row in rows}


def without_a_planner(dag: DAG, seed: int) -> dict[str, tuple[Table, Table]]:
    """Each node's input and output, all columns, in one place."""
    done: dict[str, tuple[Table, Table]] = {}
    for node in dag.ordered():
        table = joined([done[parent][1] for parent in node.after]) if node.after else loaded(seed)
        done[node.name] = (table, applied(node, table))
    return done


def owners(edge: Edge, parts: Sequence[Table]) -> dict[int, str | None]:
    """Who gets each row of what the edge's sources have; None is everyone."""
    lines = sorted(
        (row, values["group_id"], values["tokens"], values.get("minibatch", 0), source)
        for source, part in enumerate(parts)
        for row, values in part.items()
    )
    rows = [line[0] for line in lines]
    assert len(set(rows)) == len(rows), "a row is there twice"
    if edge.rows is Rows.REPLICATED:
        return dict.fromkeys(rows)
    statistics = np.array(lines, np.int64).reshape(-1, 5).T
    owner = assign(edge, Statistics(*statistics, positions=statistics[0]))
    return {row: edge.targets[index] for row, index in zip(rows, owner.tolist(), strict=True)}


@dataclass
class Cluster:
    plan: Plan
    seed: int
    published: dict[tuple[str, str], Table] = field(default_factory=dict)
    inputs: dict[str, dict[str, Table]] = field(default_factory=dict)
    kept: dict[str, dict[int, tuple[int, Table]]] = field(default_factory=dict)

    def run(self) -> None:
        """Round and round over the workers; a Recv waits until all it needs is published."""
        workers = [Worker(chain, self) for chain in self.plan.chains.values()]
        while any(not worker.done for worker in workers):
            assert sum(worker.advance() for worker in workers), "deadlock"
        for worker in workers:
            assert not worker.tables, "a table was never dropped"

    def arrived(self, edge: Edge) -> bool:
        return all((edge.name, source) in self.published for source in edge.sources)

    def pull(self, edge: Edge, guide: Edge, worker: str) -> Table:
        owner = owners(guide, [self.published[guide.name, source] for source in guide.sources])
        rows = {row: source for source in edge.sources for row in self.published[edge.name, source]}
        assert sum(len(self.published[edge.name, source]) for source in edge.sources) == len(rows)
        return {
            row: {name: self.published[edge.name, rows[row]][row][name] for name in edge.schema.names}
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

    @property
    def done(self) -> bool:
        return self.position == len(self.chain.links)

    def advance(self) -> bool:
        """Run on until a Recv has to wait. True if anything was done."""
        start = self.position
        while not self.done:
            link = self.chain.links[self.position]
            if isinstance(link, Recv) and not (self.cluster.arrived(link.edge) and self.cluster.arrived(link.guide)):
                break
            self.follow(link)
            self.position += 1
        return self.position > start

    def add(self, name: str, table: Table) -> None:
        assert name not in self.had, f"{name} was there before"
        self.had.add(name)
        self.tables[name] = table

    def follow(self, link: object) -> None:
        cluster, worker = self.cluster, self.chain.worker
        match link:
            case Load(name, names, index, count):
                rows = {
                    r: values for r, values in loaded(cluster.seed).items() if lies(r, cluster.seed, count) == index
                }
                self.add(name, {row: {column: values[column] for column in names} for row, values in rows.items()})
            case Run(node, inputs, names):
                given_to_it: list[Table] = []
                for item in inputs:
                    rows = self.tables[item.table]
                    given_to_it.append(
                        {r: {column: values[column] for column in item.columns} for r, values in rows.items()}
                    )
                table = joined(given_to_it)
                cluster.inputs.setdefault(node.name, {})[worker] = table
                made = applied(node, table)
                self.add(node.name, {r: {column: values[column] for column in names} for r, values in made.items()})
            case Send(edge):
                assert worker in edge.sources
                assert (edge.name, worker) not in cluster.published
                cluster.published[edge.name, worker] = self.tables[edge.source]
            case Recv(edge, guide):
                assert worker in edge.targets
                assert guide.target == edge.target
                self.add(edge.name, cluster.pull(edge, guide, worker))
            case Keep(node, table, index, count):
                parts = cluster.kept.setdefault(table, {})
                assert index not in parts, "two workers write the same part"
                parts[index] = (count, self.tables[node])
            case Drop(table):
                del self.tables[table]
