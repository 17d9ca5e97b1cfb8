"""Blobs go straight from the node that has them to the node that reads them, and arrive as if
they had gone along.
"""

from __future__ import annotations

import hashlib
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.planner import (
    DAG,
    Node,
    Role,
    Rows,
    RunNode,
    TableSizes,
    columns,
    compile_chains,
    estimate,
)
from siirl_dask.planner import column as columns_of_plans
from siirl_dask.schema import is_blob
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import build_nothing, fill
from siirl_dask.views.plan import describe

ROLES = (Role("a", build_nothing), Role("b", build_nothing), Role("c", build_nothing))
WORKERS = ("w0", "w1", "w2", "w3")
APART = {"a": [0, 1], "b": [2, 3], "c": [1, 2]}
SOURCE = pa.schema({"prompt": pa.string()})
IMAGE = {"image": pa.binary()}


def plain(ctx, table):
    return table


@columns(writes=IMAGE)
def paint(ctx, table): ...


@columns(new_rows=True)
def others(ctx, table): ...


@columns(optional=["image"])
def glance(ctx, table): ...


@columns(reads=["image"], writes={"digest": pa.string(), "minibatch": pa.int32()})
def look(ctx, table):
    images = table["image"].to_pylist()
    digests = [hashlib.sha256(image).hexdigest() for image in images]
    table = table.append_column("digest", pa.array(digests, pa.string()))
    return table.append_column(
        "minibatch", pa.array([len(image) % 2 for image in images], pa.int32())
    )


@columns(reads=["image", "digest"], writes={"same": pa.bool_()})
def compare(ctx, table):
    pairs = zip(table["image"].to_pylist(), table["digest"].to_pylist(), strict=True)
    same = [hashlib.sha256(image).hexdigest() == digest for image, digest in pairs]
    return table.append_column("same", pa.array(same, pa.bool_()))


def node(name, fn, role, *after, rows=Rows.ANYWHERE, reads=(), keep=None):
    return Node(
        name,
        fn,
        role=role,
        after=after,
        rows=rows,
        save_as=keep,
        reads=(*fn.__contract__.reads, *reads) if fn is not plain else reads,
    )


def planned(*nodes, placement=APART):
    return compile_chains(DAG(ROLES, nodes), WORKERS, SOURCE, placement)


def carriers(plan):
    return {edge.name for edge in plan.edges if "image" in edge.schema.names}


def inputs(plan, name):
    links = (link for chain in plan.chains.values() for link in chain.links)
    run = next(link for link in links if isinstance(link, RunNode) and link.node.name == name)
    return {
        item.table: [column for column in item.columns if column == "image"] for item in run.inputs
    }


@pytest.mark.parametrize(
    ("kind", "blob"),
    [
        (pa.binary(), True),
        (pa.large_binary(), True),
        (pa.binary(16), True),
        (pa.list_(pa.large_binary()), True),
        (pa.struct({"bytes": pa.binary(), "path": pa.string()}), True),
        (pa.list_(pa.struct({"of": pa.list_(pa.binary(), 2)})), True),
        (pa.string(), False),
        (pa.list_(pa.int32()), False),
        (pa.struct({"binary": pa.string()}), False),
    ],
)
def test_what_a_blob_is(kind, blob):
    assert is_blob(kind) is blob


def test_a_node_that_does_not_read_an_image_is_left_out():
    plan = planned(
        node("paint", paint, "a"),
        node("between", plain, "b", "paint", rows=Rows.GROUPED),
        node("further", plain, "c", "between", rows=Rows.BALANCED),
        node("reads", plain, "b", "further", reads=["image"]),
    )
    assert carriers(plan) == {"paint->reads"}
    edges = {edge.name: edge for edge in plan.edges}
    assert edges["paint->reads"].guide == edges["further->reads"].guide == "further"
    assert "image" not in plan.flow["between"].needed
    assert "image" not in plan.flow["between"].outputs


def test_in_place_the_table_that_has_the_image_waits_for_its_reader():
    plan = planned(
        node("paint", paint, "a"),
        node("between", plain, "a", "paint"),
        node("reads", glance, "a", "between"),
    )
    assert plan.edges == ()
    assert inputs(plan, "between") == {"paint": []}
    assert inputs(plan, "reads") == {"between": [], "paint": ["image"]}


@pytest.mark.parametrize(
    ("fn", "reads"), [(plain, ["image"]), (glance, [])], ids=["reads", "reads if there is one"]
)
def test_an_image_comes_from_the_last_node_that_read_it_there(fn, reads):
    nodes = [
        node("paint", paint, "a"),
        node("first", fn, "b", "paint", reads=reads),
        node("groups", plain, "b", "first", rows=Rows.GROUPED),
        node("second", plain, "b", "groups", rows=Rows.BALANCED, reads=["image"]),
    ]
    assert carriers(planned(*nodes)) == {"paint->first", "first->second"}


def test_an_image_comes_from_the_branch_of_the_readers_role():
    nodes = [
        node("paint", paint, "a"),
        node("here", plain, "a", "paint", reads=["image"]),
        node("there", plain, "b", "paint", reads=["image"]),
        node("join", plain, "b", "here", "there"),
        node("reads", plain, "b", "join", reads=["image"]),
    ]
    plan = planned(*nodes)
    assert carriers(plan) == {"paint->there"}
    assert inputs(plan, "reads") == {"join": [], "there": ["image"]}


def test_two_readers_in_one_layout_share_the_rows_that_came():
    nodes = [
        node("paint", paint, "a"),
        node("between", plain, "b", "paint", rows=Rows.GROUPED),
        node("one", plain, "b", "between", reads=["image"]),
        node("two", plain, "b", "between", reads=["image"]),
        node("else", plain, "b", "between", rows=Rows.BALANCED, reads=["image"]),
    ]
    plan = planned(*nodes)
    assert carriers(plan) == {"paint->one", "paint->else"}
    assert inputs(plan, "two") == {"between": [], "paint->one": ["image"]}


@pytest.mark.parametrize(
    "between",
    [node("between", others, "b", "paint"), node("between", plain, "b", "paint", keep="table")],
    ids=["makes other rows", "is kept"],
)
def test_a_node_that_makes_other_rows_or_is_kept_has_the_image_in_its_table(between):
    plan = planned(
        node("paint", paint, "a"), between, node("reads", plain, "a", "between", reads=["image"])
    )
    assert carriers(plan) == {"paint->between", "between->reads"}


def test_an_image_that_nobody_reads_after_other_rows_were_made_stays_behind():
    plan = planned(
        node("paint", paint, "a"),
        node("between", others, "b", "paint"),
        node("end", plain, "a", "between"),
    )
    assert carriers(plan) == set()


def test_the_plan_shows_the_edge_that_leads_past_a_node():
    nodes = [
        node("paint", paint, "a"),
        node("between", plain, "b", "paint"),
        node("reads", glance, "b", "between"),
    ]
    plan = planned(*nodes)
    sizes = TableSizes(prompts=8, prompt_tokens=1, response_tokens=1, widths={"image": 1000})
    assert {pair: found.bytes for pair, found in estimate(plan, sizes).items()} == {
        ("paint", "between"): 8 * 24,
        ("between", "reads"): 0,
        ("paint", "reads"): 8 * 1024,
    }
    text = " ".join(describe(plan, sizes).split())
    assert "paint -> reads 8 anywhere w0, w1 -> w2, w3 <= 8.2 kB image" in text
    assert "w2, w3 between (from paint; statistics to reads) > reads (from paint)" in text


@pytest.fixture
def data(tmp_path):
    rows = {
        "prompt": [f"p{i}" for i in range(24)],
        "answer": [""] * 24,
        "image": [bytes([i]) * i for i in range(24)],
    }
    pq.write_table(pa.table(rows), tmp_path / "data.parquet", row_group_size=4)
    return Source(
        url=str(tmp_path / "data.parquet"), prompt="prompt", answer="answer", batch_size=12, seed=0
    )


SHAPES = {
    "straight": (
        node("look", look, "b", "fill", rows=Rows.BALANCED),
        node("between", plain, "a", "look"),
        node("compare", compare, "c", "between", rows=Rows.BALANCED),
    ),
    "in place": (
        node("look", look, "a", "fill"),
        node("between", plain, "a", "look"),
        node("compare", compare, "a", "between"),
    ),
    "by minibatch": (
        node("look", look, "b", "fill", rows=Rows.GROUPED),
        node("between", plain, "b", "look"),
        node("compare", compare, "b", "between", rows=Rows.BALANCED, reads=["minibatch"]),
    ),
    "join": (
        node("look", look, "a", "fill"),
        node("side", plain, "b", "fill", rows=Rows.GROUPED),
        node("compare", compare, "b", "side", "look", rows=Rows.GROUPED),
    ),
    "everywhere": (
        node("look", look, "b", "fill"),
        node("between", plain, "c", "look", rows=Rows.BALANCED),
        node("compare", compare, "a", "between", rows=Rows.REPLICATED),
    ),
}


def kept(data, shape, placement, url):
    nodes = (
        Node("fill", partial(fill, tokens=3), role="a"),
        *SHAPES[shape],
        node("all", plain, "c", "compare", keep="all"),
    )
    schema = source_schema(open_source(data).schema, data)
    plan = compile_chains(DAG(ROLES, nodes), WORKERS, schema, placement)
    with LocalPool(plan, data, url=url) as pool:
        pool.run()
    table = pq.read_table(f"{url}/all").sort_by("row_id")
    return plan, table.select(sorted(table.column_names))


@pytest.mark.parametrize(
    "placement", [APART, {}, {"a": [0], "b": [0], "c": [0]}], ids=["apart", "together", "one"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_comes_out_as_if_images_went_from_node_to_node(
    data, tmp_path, monkeypatch, shape, placement
):
    straight, found = kept(data, shape, placement, str(tmp_path / "straight"))
    monkeypatch.setattr(columns_of_plans, "is_blob", lambda kind: False)
    along, expected = kept(data, shape, placement, str(tmp_path / "along"))
    assert found == expected
    assert found["same"].to_pylist() == [True] * 12
    assert all(image == bytes([len(image)]) * len(image) for image in found["image"].to_pylist())
    if "between" in straight.flow:
        assert "image" in along.flow["between"].needed
        assert "image" not in straight.flow["between"].needed
