"""Any DAG on any placement sees what it would see without a planner; see simulation.py."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.planner import (
    DAG,
    NO_DATA,
    Drop,
    Edge,
    Node,
    Plan,
    Recv,
    Rows,
    RunNode,
    Stream,
    compile_chains,
    frontiers,
    trace_columns,
)
from siirl_dask.planner.node import STAGES
from siirl_dask.schema import IDENTITY, MINIBATCH, TYPES, is_blob, make_schema
from tests.planner.random_dags import (
    NEW_ROWS,
    QUICKLY,
    SOURCE,
    fewer_rows,
    gives,
    narrow,
    plans,
    takes,
)
from tests.planner.simulation import AHEAD, Cluster, owners, without_a_planner

seeds = st.integers(0, 7)


def streamed(plan: Plan) -> list[tuple[set[str], set[str]]]:
    """Workers of each node that gives parts, and of the one that takes them."""
    return [
        tuple(set(plan.placement[plan.dag.node(name).role]) for name in ends)
        for ends in plan.streams.items()
    ]


def runs(plan: Plan) -> list[RunNode]:
    return [
        link for chain in plan.chains.values() for link in chain.flat if isinstance(link, RunNode)
    ]


def reads(node: Node, available: set[str]) -> set[str]:
    return {*node.contract.reads, *(name for name in node.contract.optional if name in available)}


def ran(plan: Plan, seed: int) -> Cluster:
    cluster = Cluster(plan, seed)
    cluster.run()
    return cluster


@QUICKLY
@given(plans(), seeds)
def test_every_node_sees_the_rows_of_its_parents_and_the_columns_it_reads(plan, seed):
    expected = without_a_planner(plan.dag, seed)
    cluster = ran(plan, seed)
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
            places = {
                (values["group_id"], worker)
                for worker, part in parts.items()
                for values in part.values()
            }
            assert len(places) == len({group for group, _ in places})


@QUICKLY
@given(plans(), seeds)
def test_rows_lie_as_their_node_wants_them_whether_they_were_moved_or_left(plan, seed):
    """An edge of the node's policy would move none of them. So what the planner left in place
    was in place.
    """
    cluster = ran(plan, seed)
    for node in plan.dag.nodes:
        if node.rows in (Rows.GROUPED, Rows.BALANCED):
            workers, node_columns = plan.placement[node.role], plan.flow[node.name]
            by_minibatch = node.rows is Rows.BALANCED and MINIBATCH in node_columns.needed
            again = Edge(
                "here", "there", workers, workers, node.rows, by_minibatch, make_schema({}), "here"
            )
            parts = [cluster.inputs[node.name][worker] for worker in workers]
            lie = {row: worker for worker, part in zip(workers, parts, strict=True) for row in part}
            assert owners(again, parts) == lie


@QUICKLY
@given(plans(), seeds)
def test_what_is_kept_is_the_whole_output_once(plan, seed):
    expected = without_a_planner(plan.dag, seed)
    cluster = ran(plan, seed)
    tables = {table for table in cluster.kept if not table.startswith(f"{STAGES}/")}
    assert tables == {node.save_as for node in plan.dag.nodes if node.save_as}
    for node in plan.dag.nodes:
        if node.save_as:
            parts = cluster.kept[node.save_as]
            assert {count for count, _ in parts.values()} == {len(parts)}
            assert sorted(parts) == list(range(len(parts)))
            rows = [(row, values) for _, part in parts.values() for row, values in part.items()]
            assert sorted(row for row, _ in rows) == sorted(expected[node.name][1])
            node_columns = plan.flow[node.name]
            shared = {
                c.name for c in node_columns.produced.values() if c.of_groups and is_blob(c.type)
            }
            left_out = set(node_columns.produced) - set(node_columns.outputs)
            assert left_out <= (set() if node_columns.one_a_group or node.save_blobs else shared)
            for row, values in expected[node.name][1].items():
                assert dict(rows)[row] == {
                    name: value for name, value in values.items() if name not in left_out
                }


@QUICKLY
@given(plans(), seeds, st.integers(0, 7), st.integers(1, 3))
def test_from_a_frontier_every_node_that_is_left_sees_what_it_would_have_seen(
    plan, seed, place, workers
):
    """On any workers, whichever node's rows are stored as a stage."""
    staged = DAG(
        plan.dag.roles,
        [replace(node, save_as=None, save_blobs=False, stage=True) for node in plan.dag.nodes],
    )
    cuts, _ = frontiers(staged, trace_columns(staged, SOURCE))
    cut = cuts[place % len(cuts)] if cuts else None
    if cut is None:
        return
    expected = without_a_planner(staged, seed)
    again = compile_chains(cut.dag, [f"other{number}" for number in range(workers)], NO_DATA)
    cluster = Cluster(again, seed, expected[cut.node][1])
    cluster.run()
    for node in cut.dag.nodes[1:]:
        whole, parts = expected[node.name][0], cluster.inputs[node.name].values()
        assert {row for part in parts for row in part} == set(whole)
        for row, values in ((row, values) for part in parts for row, values in part.items()):
            assert reads(node, set(whole[row])) <= set(values)
            assert values == {name: whole[row][name] for name in values}


@QUICKLY
@given(plans())
def test_an_edge_carries_only_what_somebody_after_it_reads(plan):
    children = {
        node.name: [n for n in plan.dag.nodes if node.name in n.after] for node in plan.dag.nodes
    }

    def wanted(node: Node, column: str) -> bool:
        if column in reads(node, {column}):
            return True
        through = node.contract.passes and column not in node.contract.writes.names
        return through and (
            node.stored_as is not None
            or any(wanted(child, column) for child in children[node.name])
        )

    for edge in plan.edges:
        names = edge.schema.names
        assert not names or names[: len(IDENTITY)] == list(IDENTITY)
        for column in set(names) - set(IDENTITY):
            assert wanted(plan.dag.node(edge.target), column)
        assert all(
            edge.schema.field(name).type == TYPES[name] for name in names if name in IDENTITY
        )
    for worker in plan.chains.values():
        for link in worker.links:
            if isinstance(link, RunNode):
                carried = [
                    name for item in link.inputs for name in item.columns if name not in IDENTITY
                ]
                assert len(carried) == len(set(carried)), "a column comes along two branches"


@QUICKLY
@given(plans())
def test_a_blob_is_only_where_it_is_used_and_comes_from_where_it_was(plan):
    """Used: read, kept, or carried on to other rows. Where it was: in the table of a node that
    used or made it.
    """

    def uses(node: Node, column: str) -> bool:
        return (
            column in reads(node, {column}) or node.stored_as is not None or node.contract.new_rows
        )

    for worker in plan.chains.values():
        for link in worker.links:
            if isinstance(link, RunNode) and link.node.after:
                types = {
                    name: column.type
                    for name, column in plan.flow[link.node.name].available.items()
                }
                blobs = [
                    name for item in link.inputs for name in item.columns if is_blob(types[name])
                ]
                assert all(uses(link.node, name) for name in blobs)
    for edge in plan.edges:
        source = plan.dag.node(edge.source)
        for column in (field.name for field in edge.schema if is_blob(field.type)):
            assert (
                uses(source, column) or column in source.contract.writes.names or not source.after
            )
            assert uses(plan.dag.node(edge.target), column)


@QUICKLY
@given(plans(), seeds)
def test_what_goes_in_parts_is_never_there_as_a_whole_and_the_rest_is(plan, seed):
    cluster = ran(plan, seed)
    assert cluster.untaken <= AHEAD
    for node in plan.dag.nodes:
        children = [other for other in plan.dag.nodes if node.name in other.after]
        alone = len(children) == 1 and not any(
            children[0].name in other.after for other in plan.dag.nodes
        )
        able = (
            alone
            and node.fn is gives
            and children[0].fn is takes
            and children[0].rows is Rows.REPLICATED
        )
        assert (node.name in plan.streams) == (able and not node.save_as)
    for chain in plan.chains.values():
        whole = {link.node.name for link in chain.links if isinstance(link, RunNode)}
        assert whole.isdisjoint({*plan.streams, *plan.streams.values()})


@QUICKLY
@given(plans())
def test_a_recv_waits_only_for_nodes_that_come_earlier(plan):
    order = {node.name: position for position, node in enumerate(plan.dag.ordered())}
    for chain in plan.chains.values():
        nodes = [order[link.node.name] for link in chain.links if isinstance(link, RunNode)]
        assert nodes == sorted(nodes)
        for position, link in enumerate(chain.links):
            if isinstance(link, Recv):
                runs = next(
                    later for later in chain.links[position:] if isinstance(later, RunNode | Stream)
                )
                node = runs.node if isinstance(runs, RunNode) else runs.source
                assert order[link.edge.source] < order[node.name]
                assert order[link.guide.source] < order[node.name]


@QUICKLY
@given(plans())
def test_a_plan_is_no_larger_than_its_dag(plan):
    """An edge for each parent, and for each blob that comes from further above; a few links a
    node and an edge.
    """
    parents = sum(len(node.after) for node in plan.dag.nodes)
    from_above = sum(
        len(set(node_columns.sources.values()) - set(node_columns.node.after))
        for node_columns in plan.flow.values()
    )
    guides = len(plan.dag.nodes)
    assert len(plan.edges) <= parents + from_above + guides
    for chain in plan.chains.values():
        others = [link for link in chain.links if not isinstance(link, Drop)]
        assert len(others) <= 3 * len(plan.dag.nodes) + 2 * len(plan.edges)
        assert len(chain.links) <= 2 * len(others)


def test_what_is_drawn_has_every_shape():
    """Else the tests above would hold for less than they say."""
    seen: set[str] = set()
    shapes: dict[str, bool] = {}

    @settings(QUICKLY, max_examples=500)
    @given(plans())
    def look(plan):
        nodes = plan.dag.nodes
        children = {node.name: [n.name for n in nodes if node.name in n.after] for node in nodes}
        places = [set(plan.placement[role]) for role in {node.role for node in nodes}]
        shapes.update(
            {
                "fan-out": any(len(c) > 1 for c in children.values()),
                "join": any(len(n.after) > 1 for n in nodes),
                "several sinks": sum(not c for c in children.values()) > 1,
                "several entries": sum(not n.after for n in nodes) > 1,
                "roles apart": len(places) > 1 and sum(map(len, places)) == len(set.union(*places)),
                "roles together": len(places) > 1 and bool(set.intersection(*places)),
                "idle workers": any(not chain.links for chain in plan.chains.values()),
                **{fn.__name__: any(n.fn is fn for n in nodes) for fn in (*NEW_ROWS, narrow)},
                "by group": any(edge.by_group for edge in plan.edges),
                "by group, in place": any(
                    item.by_group and "->" not in item.table
                    for run in runs(plan)
                    for item in run.inputs
                ),
                "by group, with some of them here": any(
                    isinstance(link, Recv) and link.have
                    for chain in plan.chains.values()
                    for link in chain.flat
                ),
                "by group, to everywhere": any(
                    e.by_group and e.rows is Rows.REPLICATED for e in plan.edges
                ),
                "in parts, apart": any(
                    places[0].isdisjoint(places[1]) for places in streamed(plan)
                ),
                "in parts, together": any(
                    len(places[0] & places[1]) > 1 for places in streamed(plan)
                ),
                "in parts, on some": any(
                    places[0] - places[1] and places[0] & places[1] for places in streamed(plan)
                ),
                "in parts, alone": any(
                    places[0] == places[1] and len(places[0]) == 1 for places in streamed(plan)
                ),
                "not in parts": sum(n.fn is gives for n in nodes) > len(plan.streams),
                "after fewer rows": any(
                    plan.dag.node(p).fn is fewer_rows for n in nodes for p in n.after
                ),
            }
        )
        seen.update(name for name, there in shapes.items() if there)

    look()
    assert seen == set(shapes)
