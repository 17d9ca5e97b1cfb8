"""DAGs of every shape on placements of every kind, as hypothesis strategies; see simulation.py."""

from __future__ import annotations

import os

import pyarrow as pa
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Node,
    Plan,
    Role,
    Rows,
    WeightSink,
    WeightSource,
    columns,
    compile_chains,
)

# the same examples each time; SIIRL_EXAMPLES=20000 looks further
QUICKLY = settings(
    max_examples=int(os.environ.get("SIIRL_EXAMPLES", "200")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
SOURCE = pa.schema({"d0": pa.int64(), "d1": pa.int64(), "d2": pa.binary()})


def build(device, rank): ...


@columns(optional=["c0", "c3"])
def same_rows(ctx, table): ...


@columns(passes=False)
def narrow(ctx, table): ...


@columns(expand="n")
def more_rows(ctx, table, *, n: int = 2): ...


@columns(expand="n", groups="kept")
def samples(ctx, table, *, n: int = 2): ...


@columns(expand="n", groups="new")
def other_groups(ctx, table, *, n: int = 2): ...


@columns(new_rows=True, groups="kept")
def fewer_groups(ctx, table): ...


@columns(new_rows=True)
def fewer_rows(ctx, table): ...


@columns(new_rows=True, passes=False)
def other_rows(ctx, table): ...


NEW_ROWS = [more_rows, samples, other_groups, fewer_rows, fewer_groups, other_rows]


def in_parts(ctx, table, *, max_bytes): ...


def from_parts(ctx, parts): ...


@columns(new_rows=True, passes=False, stream=WeightSource(in_parts))
def gives(ctx, table): ...


@columns(stream=WeightSink(from_parts))
def takes(ctx, table): ...


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
        alike = [
            parent for parent in made_by if first is not None and made_by[parent] == made_by[first]
        ]
        after = tuple(draw(st.permutations(alike))[: draw(st.integers(1, 3))]) if alike else ()
        rows = draw(st.sampled_from(list(Rows))) if after else Rows.ANYWHERE
        replicated = rows is Rows.REPLICATED or (
            rows is Rows.ANYWHERE and not everywhere.isdisjoint(after)
        )
        # what is new of rows that are everywhere would be there twice
        fn = draw(
            st.sampled_from([same_rows, same_rows, narrow, *([] if replicated else NEW_ROWS)])
        )
        available = (
            set(SOURCE.names).union(*(seen[parent] for parent in after)) if not after else set()
        )
        available = available.union(*(seen[parent] for parent in after))
        reads = (
            draw(st.lists(st.sampled_from(sorted(available)), unique=True, max_size=3))
            if available
            else []
        )
        written = (
            {f"c{i}": draw(st.sampled_from([pa.int64(), pa.binary()]))}
            if draw(st.booleans())
            else {}
        )
        written |= {"minibatch": pa.int64()} if draw(st.integers(0, 3)) == 0 else {}
        keep = f"table{i}" if draw(st.integers(0, 3)) == 0 else None
        save_blobs = keep is not None and draw(st.booleans())
        schema = pa.schema(written)
        nodes.append(
            Node(
                name,
                fn,
                role=draw(st.sampled_from(ROLES)),
                after=after,
                rows=rows,
                save_as=keep,
                save_blobs=save_blobs,
                reads=tuple(reads),
                writes=schema,
            )
        )
        made_by[name] = name if fn in NEW_ROWS else made_by[after[0]] if after else ""
        seen[name] = (available if fn not in (narrow, other_rows) else set()) | set(written)
        if replicated and fn in (same_rows, narrow):
            everywhere.add(name)
    for i in range(draw(st.integers(0, 2))):
        nodes += pairs(draw, i, draw(st.sampled_from([None, *sorted(made_by.keys() - everywhere)])))
    return DAG([Role(role, build) for role in ROLES], nodes)


def pairs(draw: st.DrawFn, number: int, before: str | None) -> list[Node]:
    """A node that can give parts and one that can take them, with what may come between them or
    forbid it.
    """
    written = pa.schema({f"part{number}": pa.binary()})
    roles, rows = st.sampled_from(ROLES), st.sampled_from([Rows.REPLICATED] * 3 + [Rows.ANYWHERE])
    keep = st.sampled_from([None] * 5 + [f"parts{number}"])
    after = (before,) if before is not None else ()
    source = Node(
        f"gives{number}", gives, role=draw(roles), after=after, save_as=draw(keep), writes=written
    )
    target = Node(
        f"takes{number}",
        takes,
        role=draw(roles),
        after=(source.name,),
        rows=draw(rows),
        reads=tuple(written.names),
    )
    aside = Node(
        f"aside{number}",
        same_rows,
        role=draw(roles),
        after=draw(st.sampled_from([(), (), (), (source.name,)])),
    )
    beyond = (
        [Node(f"beyond{number}", same_rows, role=draw(roles), after=(target.name,))]
        if draw(st.integers(0, 4)) == 0
        else []
    )
    return [source, *draw(st.permutations([aside, target])), *beyond]


@st.composite
def joins(draw: st.DrawFn) -> DAG:
    """Branches that lay the same rows out by the same policy, each from where another branch had
    them, and a join.
    """
    policies = st.sampled_from([Rows.ANYWHERE, Rows.GROUPED, Rows.BALANCED])
    alike, reads = draw(policies), draw(st.sampled_from([(), ("minibatch",)]))
    nodes = [
        Node(
            "x",
            same_rows,
            role="a",
            writes=pa.schema({"minibatch": pa.int64(), "blob": pa.binary()}),
        )
    ]
    for i in range(draw(st.integers(1, 3))):
        before = draw(st.sampled_from([node.name for node in nodes]))
        nodes.append(
            Node(
                f"y{i}",
                same_rows,
                role=draw(st.sampled_from(ROLES)),
                after=(before,),
                rows=draw(policies),
            )
        )
    for i, before in enumerate(draw(st.permutations([node.name for node in nodes]))[:3]):
        nodes.append(
            Node(f"alike{i}", same_rows, role="c", after=(before,), rows=alike, reads=reads)
        )
    after = tuple(node.name for node in nodes if node.name.startswith("alike"))
    nodes.append(
        Node(
            "join",
            same_rows,
            role="c",
            after=after,
            rows=draw(st.sampled_from([alike, Rows.ANYWHERE])),
            reads=("blob",),
        )
    )
    return DAG([Role(role, build) for role in ROLES], nodes)


@st.composite
def groups(draw: st.DrawFn) -> DAG:
    """A blob of prompts, nodes that make samples of them or leave groups out, and nodes that
    read the blob there.
    """
    roles, policies = (
        st.sampled_from(ROLES),
        st.sampled_from([Rows.ANYWHERE, Rows.GROUPED, Rows.BALANCED]),
    )
    makes = st.sampled_from([samples, samples, fewer_groups, other_groups, more_rows, same_rows])
    everywhere = st.sampled_from([False] * 5 + [True])
    role, reads = draw(roles), st.sampled_from([(), ("blob",)])
    nodes = [
        Node(
            "x",
            same_rows,
            role=role,
            writes=pa.schema({"blob": pa.binary(), "minibatch": pa.int64()}),
        )
    ]
    for i in range(draw(st.integers(1, 3))):
        fn, before, stage = draw(makes), nodes[-1].name, draw(everywhere)
        given = {"role": draw(roles), "rows": draw(policies), "reads": draw(reads), "stage": stage}
        nodes.append(Node(f"y{i}", fn, after=(before,), **given))
    last = nodes[-1].name
    for i in range(draw(st.integers(1, 4))):
        rows = Rows.REPLICATED if draw(everywhere) else draw(policies)
        before = last if rows is Rows.REPLICATED else draw(st.sampled_from([last, nodes[-1].name]))
        before = (
            last
            if DAG([Role(r, build) for r in ROLES], nodes).node(before).rows is Rows.REPLICATED
            else before
        )
        columns_read = ("blob", *draw(st.sampled_from([(), ("minibatch",)])))
        nodes.append(
            Node(
                f"z{i}", same_rows, role=draw(roles), after=(before,), rows=rows, reads=columns_read
            )
        )
    return DAG([Role(role, build) for role in ROLES], nodes)


@st.composite
def placements(draw: st.DrawFn, count: int) -> dict[str, list[int]]:
    """Roles that share workers, have some of their own, or are apart altogether; some workers
    may have none.
    """
    workers = draw(st.permutations(range(count)))
    if count >= len(ROLES) and draw(st.booleans()):
        cuts = sorted(draw(st.permutations(range(1, count)))[: len(ROLES) - 1])
        parts = zip(
            [0, *cuts], [*cuts, count - draw(st.integers(0, count - cuts[-1] - 1))], strict=True
        )
        return dict(zip(ROLES, (workers[start:stop] for start, stop in parts), strict=True))
    shares = {role: draw(st.permutations(workers))[: draw(st.integers(1, count))] for role in ROLES}
    return {role: share for role, share in shares.items() if draw(st.booleans())}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dag, count = draw(dags() | joins() | groups()), draw(st.integers(1, 5))
    placement = draw(placements(count))
    try:
        names = [f"w{i}" for i in range(count)]
        hosts = (
            {name: draw(st.sampled_from("abc")) for name in names} if draw(st.booleans()) else None
        )
        return compile_chains(dag, names, SOURCE, placement, hosts)
    except PlanError as error:  # two branches wrote a column of one name
        assume("joins two columns" not in str(error))
        raise
