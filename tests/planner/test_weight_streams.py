"""Tables that move in parts: how a plan shows them, what they take of memory, and that their
order is checked.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa
import pytest

from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Chain,
    Node,
    Role,
    Rows,
    RunNode,
    Stream,
    TableSizes,
    WeightSink,
    WeightSource,
    columns,
    compile_chains,
    usage,
)
from siirl_dask.planner.deadlock import check_order
from siirl_dask.schema import PARAMETER_DTYPE, PARAMETER_SHAPE, fields
from siirl_dask.views.plan import describe, draw
from tests.planner.random_dags import (
    SOURCE,
    build,
    from_parts,
    gives,
    in_parts,
    other_rows,
    same_rows,
    takes,
)

WORKERS = ("w0", "w1", "w2")
PLACED = {"learns": [0, 1], "samples": [1, 2]}
SIZES = TableSizes(
    prompts=1,
    prompt_tokens=1,
    response_tokens=1,
    totals={"give": 9000},
    pieces={"give": (10, 1000)},
)


@pytest.fixture
def plan():
    nodes = (
        Node("first", same_rows, role="samples"),
        Node("give", gives, role="learns", writes=SOURCE),
        Node("other", same_rows, role="samples", after="first", reads=("d0",)),
        Node("take", takes, role="samples", after="give", rows=Rows.REPLICATED, reads=("d0", "d2")),
    )
    return compile_chains(
        DAG((Role("learns", build), Role("samples", build)), nodes), WORKERS, SOURCE, PLACED
    )


def test_a_stream_is_one_link_at_the_place_of_its_source(plan):
    links = {
        worker: [
            (link.source.name, link.gives, link.takes)
            if isinstance(link, Stream)
            else link.node.name
            for link in chain.links
            if isinstance(link, RunNode | Stream)
        ]
        for worker, chain in plan.chains.items()
    }
    assert links == {
        "w0": [("give", True, False)],
        "w1": ["first", ("give", True, True), "other"],
        "w2": ["first", ("give", False, True), "other"],
    }
    (edge,) = [edge for edge in plan.edges if edge.source == "give"]
    assert (edge.sources, edge.targets, edge.rows) == (("w0", "w1"), ("w1", "w2"), Rows.REPLICATED)


def test_a_plan_is_read_with_them(plan):
    text = describe(plan, SIZES)
    assert re.search(r"w0 +give \(from data; in parts to take\)", text)
    assert re.search(
        r"w1 +first \(from data\) > give \(from data; in parts to take\) > take \(in parts from "
        r"give\) > other",
        text,
    )
    assert re.search(r"w2 +first \(from data\) > take \(in parts from give\) > other", text)
    assert re.search(r"give -> take +\S+ replicated in parts", text)
    assert "replicated in parts" in draw({"train": (plan, SIZES)})


def moved(plan, worker, before):
    """With the stream of a worker before another node of its."""
    links = list(plan.chains[worker].links)
    (stream,) = [link for link in links if isinstance(link, Stream)]
    links.remove(stream)
    at = next(
        i for i, link in enumerate(links) if isinstance(link, RunNode) and link.node.name == before
    )
    return replace(
        plan, chains={**plan.chains, worker: Chain(worker, (*links[:at], stream, *links[at:]))}
    )


def without(plan, worker):
    links = tuple(link for link in plan.chains[worker].links if not isinstance(link, Stream))
    return replace(plan, chains={**plan.chains, worker: Chain(worker, links)})


def test_an_order_in_which_workers_could_wait_for_each_other_is_refused(plan):
    check_order(plan)
    for broken, said in (
        (moved(plan, "w2", "first"), "worker 'w2' runs 'first' after 'take'"),
        (moved(plan, "w1", "first"), "worker 'w1' runs 'first' after 'take'"),
        (without(plan, "w0"), "worker 'w0' runs [] of role 'learns': expected ['give']"),
        (without(plan, "w2"), "worker 'w2' runs ['first', 'other'] of role 'samples'"),
    ):
        with pytest.raises(PlanError, match=re.escape(said)):
            check_order(broken)


def test_a_worker_needs_memory_for_a_few_parts_and_not_for_the_table(plan):
    needs = {size: usage(plan, replace(SIZES, part=size)) for size in (1, 1000, 1200, 10**6)}
    tables = {
        size: [used[worker].tables for worker in ("w0", "w2")] for size, used in needs.items()
    }
    others = [tables[1200][0] - 4 * 1200, tables[1200][1] - 3 * 1200]
    assert all(0 < size < 200 for size in others)
    # its largest row
    assert tables[1] == tables[1000] == [4 * 1000 + others[0], 3 * 1000 + others[1]]
    # half of the rows, all of them
    assert tables[10**6] == [5 * 1000 + others[0], 9000 + others[1]]
    assert {used.moving for used in needs[1200].values()} == {0}


def as_tensors(ctx, table): ...


def from_tensors(ctx, parts): ...


@columns(new_rows=True, passes=False, stream=WeightSource(in_parts, as_tensors))
def gives_tensors(ctx, table): ...


@columns(stream=WeightSink(from_parts, from_tensors))
def takes_tensors(ctx, table): ...


def test_weights_that_stay_on_their_worker_take_no_tables_and_other_tables_two_parts():
    def most(give, take, workers, part):
        nodes = (
            Node("give", give, role="both", writes=SOURCE),
            Node("take", take, role="both", after="give", rows=Rows.REPLICATED, reads=("d0", "d2")),
        )
        plan = compile_chains(DAG((Role("both", build),), nodes), WORKERS[:workers], SOURCE)
        assert plan.streams == {"give": "take"}
        return {used.tables for used in usage(plan, replace(SIZES, part=part)).values()}

    (loaded,) = most(gives_tensors, takes_tensors, 1, 1000)
    assert loaded < 200, "the prompts alone"
    assert most(gives_tensors, takes_tensors, 3, 1000) == {loaded}
    assert most(gives, takes, 1, 1000) == {2 * 1000 + loaded}
    assert most(gives, takes, 1, 10**6) == {9000 + loaded}, "all of it at the most"
    (apart,) = most(gives, takes, 3, 1000)
    assert apart > 6 * 1000, "each worker sends its share and takes those of the others"


@columns(
    writes=fields(PARAMETER_DTYPE, PARAMETER_SHAPE),
    new_rows=True,
    passes=False,
    stream=WeightSource(in_parts, as_tensors),
)
def gives_parameters(ctx, table): ...


@columns(reads=[PARAMETER_DTYPE, PARAMETER_SHAPE], stream=WeightSink(from_parts, from_tensors))
def takes_parameters(ctx, table): ...


def test_a_broadcast_takes_two_buffers_on_each_worker_that_joins_it_and_no_more_than_the_table():
    nodes = (
        Node("give", gives_parameters, role="learns"),
        Node("take", takes_parameters, role="samples", after="give", rows=Rows.REPLICATED),
    )
    roles = (Role("learns", build), Role("samples", build))
    plan = compile_chains(DAG(roles, nodes), WORKERS, SOURCE, {"learns": [0, 1], "samples": [2]})
    (link,) = [link for link in plan.chains["w2"].links if isinstance(link, Stream)]
    assert set(link.joins) == {"w0", "w2"}, "of the workers that give, the first one"

    def used(part):
        sizes = replace(SIZES, part=part, buffers=True)
        return {worker: found.tables for worker, found in usage(plan, sizes).items()}

    least = used(1000)
    others = {worker: least[worker] - 2000 * (worker in link.joins) for worker in WORKERS}
    assert all(0 <= size < 200 for size in others.values())
    for part, bytes_of_buffers in ((1200, 2400), (10**6, 9000)):
        assert used(part) == {
            worker: others[worker] + bytes_of_buffers * (worker in link.joins) for worker in WORKERS
        }


@columns(writes={"mark": pa.int64()})
def marks(ctx, table): ...


@pytest.mark.parametrize("reads", [("d0", "mark"), ("mark",)])
def test_a_table_of_known_size_counts_with_a_column_that_a_later_node_has_added(reads):
    nodes = (
        Node("give", other_rows, role="learns", writes=SOURCE),
        Node("mark", marks, role="learns", after="give"),
        Node("take", same_rows, role="samples", after="mark", rows=Rows.REPLICATED, reads=reads),
    )
    roles = (Role("learns", build), Role("samples", build))
    plan = compile_chains(DAG(roles, nodes), WORKERS, SOURCE, {"learns": [0, 1], "samples": [2]})
    used = usage(plan, SIZES)
    assert {worker: found.moving for worker, found in used.items()} == {
        "w0": 5000,
        "w1": 5000,
        "w2": 9000,
    }
    assert used["w2"].tables >= 9000
