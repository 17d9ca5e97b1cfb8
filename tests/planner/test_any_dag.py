"""Any DAG on any placement, run by a small executor in one process, sees what it would see without a planner."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

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
from siirl_dask.schema import IDENTITY, TYPES

SOURCE = pa.schema({"d0": pa.int64(), "d1": pa.int64()})
PROMPTS = 7
# the same examples each time; SIIRL_EXAMPLES=20000 looks further
QUICKLY = settings(
    max_examples=int(os.environ.get("SIIRL_EXAMPLES", "200")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
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
        written = [f"c{i}"] * draw(st.booleans()) + ["minibatch"] * (draw(st.integers(0, 3)) == 0)
        keep = f"table{i}" if draw(st.integers(0, 3)) == 0 else None
        schema = pa.schema({column: pa.int64() for column in written})
        nodes.append(Node(name, fn, draw(st.sampled_from(ROLES)), after, rows, keep, tuple(reads), schema))
        made_by[name] = name if fn in (more_rows, other_rows) else made_by[after[0]] if after else ""
        seen[name] = (available if fn in (same_rows, more_rows) else set()) | set(written)
        if replicated and fn in (same_rows, narrow):
            everywhere.add(name)
    return DAG([Role(role, build) for role in ROLES], nodes)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dag, count = draw(dags()), draw(st.integers(1, 4))
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


def loaded() -> Table:
    return {
        row: {"row_id": row, "group_id": row // 2, "tokens": row % 3 + 1, "d0": ("d0", row), "d1": ("d1", row)}
        for row in range(PROMPTS)
    }


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
            result[2 * row + k] = carried | {"row_id": 2 * row + k, "tokens": (row * 7 + k * 3) % 5 + 1}
    return result


def joined(tables: list[Table]) -> Table:
    rows = set(tables[0])
    assert all(set(table) == rows for table in tables), "a join did not find its rows"
    return {row: {name: value for table in tables for name, value in table[row].items()} for row in rows}


def without_a_planner(dag: DAG) -> dict[str, tuple[Table, Table]]:
    """Each node's input and output, all columns, in one place."""
    done: dict[str, tuple[Table, Table]] = {}
    for node in dag.ordered():
        table = joined([done[parent][1] for parent in node.after]) if node.after else loaded()
        done[node.name] = (table, applied(node, table))
    return done


def owner(edge: Edge, source: str, row: dict[str, Any]) -> str | None:
    """Any rule will do that looks at nothing but the statistics; None is everyone."""
    n = len(edge.targets)
    match edge.rows:
        case Rows.REPLICATED:
            return None
        case Rows.GROUPED:
            return edge.targets[(row["group_id"] * 5 + 1) % n]
        case Rows.BALANCED if edge.by_minibatch:
            return edge.targets[(row["row_id"] + row["tokens"] + row["minibatch"]) % n]
        case Rows.BALANCED:
            return edge.targets[(row["row_id"] + row["tokens"]) % n]
    return source if source in edge.targets else edge.targets[(row["row_id"] * 3 + 1) % n]


@dataclass
class Cluster:
    plan: Plan
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
        mine: list[int] = []
        for source in guide.sources:
            statistics = self.published[guide.name, source]
            mine += [row for row, values in statistics.items() if owner(guide, source, values) in (None, worker)]
        assert len(set(mine)) == len(mine), "a row is there twice"
        rows = {row: source for source in edge.sources for row in self.published[edge.name, source]}
        assert sum(len(self.published[edge.name, source]) for source in edge.sources) == len(rows)
        names = edge.schema.names
        return {row: {name: self.published[edge.name, rows[row]][row][name] for name in names} for row in mine}


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
                rows = {row: values for row, values in loaded().items() if row % count == index}
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


def reads(node: Node, available: set[str]) -> set[str]:
    return {*node.contract.reads, *(name for name in node.contract.optional if name in available)}


@QUICKLY
@given(plans())
def test_every_node_sees_the_rows_of_its_parents_and_the_columns_it_reads(plan):
    expected = without_a_planner(plan.dag)
    cluster = Cluster(plan)
    cluster.run()
    for node in plan.dag.nodes:
        whole, parts = expected[node.name][0], cluster.inputs[node.name]
        assert set(parts) == set(plan.placement[node.role])
        for part in parts.values():
            for row, values in part.items():
                assert reads(node, set(whole[row])) <= set(values)
                assert values == {name: whole[row][name] for name in values}
        rows = sorted(row for part in parts.values() for row in part)
        everywhere = all(set(part) == set(whole) for part in parts.values())
        assert rows == sorted(whole) or everywhere
        if node.rows is Rows.REPLICATED:
            assert everywhere
        if node.rows is Rows.GROUPED:
            places = {(values["group_id"], worker) for worker, part in parts.items() for values in part.values()}
            assert len(places) == len({group for group, _ in places})


@QUICKLY
@given(plans())
def test_what_is_kept_is_the_whole_output_once(plan):
    expected = without_a_planner(plan.dag)
    cluster = Cluster(plan)
    cluster.run()
    assert set(cluster.kept) == {node.keep for node in plan.dag.nodes if node.keep}
    for node in plan.dag.nodes:
        if node.keep:
            parts = cluster.kept[node.keep]
            assert {count for count, _ in parts.values()} == {len(parts)}
            assert sorted(parts) == list(range(len(parts)))
            rows = [(row, values) for _, part in parts.values() for row, values in part.items()]
            assert sorted(row for row, _ in rows) == sorted(expected[node.name][1])
            assert dict(rows) == expected[node.name][1]


@QUICKLY
@given(plans())
def test_an_edge_carries_only_what_somebody_after_it_reads(plan):
    children = {node.name: [n for n in plan.dag.nodes if node.name in n.after] for node in plan.dag.nodes}

    def wanted(node: Node, column: str) -> bool:
        if column in reads(node, {column}):
            return True
        through = node.contract.passes and column not in node.contract.writes.names
        return through and (node.keep is not None or any(wanted(child, column) for child in children[node.name]))

    for edge in plan.edges:
        names = edge.schema.names
        assert not names or names[: len(IDENTITY)] == list(IDENTITY)
        for column in set(names) - set(IDENTITY):
            assert wanted(plan.dag.node(edge.target), column)
        assert all(edge.schema.field(name).type == TYPES.get(name, pa.int64()) for name in names if name in IDENTITY)
    for worker in plan.chains.values():
        for link in worker.links:
            if isinstance(link, Run):
                carried = [name for item in link.inputs for name in item.columns if name not in IDENTITY]
                assert len(carried) == len(set(carried)), "a column comes along two branches"


@QUICKLY
@given(plans())
def test_a_recv_waits_only_for_nodes_that_come_earlier(plan):
    order = {node.name: position for position, node in enumerate(plan.dag.ordered())}
    for chain in plan.chains.values():
        ran = [order[link.node.name] for link in chain.links if isinstance(link, Run)]
        assert ran == sorted(ran)
        for position, link in enumerate(chain.links):
            if isinstance(link, Recv):
                runs = next(later for later in chain.links[position:] if isinstance(later, Run))
                assert order[link.edge.source] < order[runs.node.name]
                assert order[link.guide.source] < order[runs.node.name]
