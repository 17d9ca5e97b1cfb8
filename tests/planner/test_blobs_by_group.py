"""A blob goes past the nodes that make samples, by group, and every row sees that of its own
group.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import NodeError, PlanError
from siirl_dask.planner import (
    Node,
    Recv,
    Rows,
    RunNode,
    TableSizes,
    columns,
    compile_chains,
    cuts_at_stored,
    estimate,
    run_again,
    usage,
)
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.views.plan import as_data, describe, draw
from tests.e2e.blob_dag import (
    SIZE,
    blob_dag,
    drop_some,
    look,
    sample,
    sample_and_lie,
    sample_renumbered,
    sample_unseen,
)

FOUR = ("w0", "w1", "w2", "w3")
APART = {"rollout": [0, 1], "policy": [2, 3]}
SCHEMA = pa.schema({"prompt": pa.string(), "answer": pa.string()})
BATCH = 16
PAINTED = 14  # prompts that are not left out
SIZES = TableSizes(prompts=BATCH, prompt_tokens=1, response_tokens=1, widths={"images": SIZE})


@columns(expand="n")
def unknown_groups(ctx, table, *, n: int): ...


@columns()
def same(ctx, table): ...


def planned(dag, workers=FOUR, placement=None, schema=SCHEMA, **how):
    return compile_chains(dag, workers, schema, APART if placement is None else placement, **how)


def carriers(plan):
    return {edge.name for edge in plan.edges if "images" in edge.schema.names}


def inputs(plan, name):
    run = next(link for chain in plan.chains.values() for link in chain.flat if _runs(link, name))
    return {item.table: item.by_group for item in run.inputs if "images" in item.columns}


def _runs(link, name):
    return isinstance(link, RunNode) and link.node.name == name


@pytest.mark.parametrize("make", [sample, sample_unseen])
def test_a_blob_goes_by_group_from_the_table_above_the_expansion(make):
    plan = planned(blob_dag(make))
    assert carriers(plan) == {"paint->look by group", "paint->learn by group"}
    edges = {edge.name: edge for edge in plan.edges}
    assert edges["paint->look by group"].guide == "sample"
    assert "images" not in plan.flow["sample"].outputs
    assert "images" not in plan.flow["look"].outputs


def test_a_reader_in_another_layout_fetches_only_groups_that_have_not_come():
    plan = planned(blob_dag())
    assert {
        link.edge.name: link.have
        for link in plan.chains["w2"].flat
        if isinstance(link, Recv) and link.edge.by_group
    } == {"paint->look by group": (), "paint->learn by group": ("paint->look by group",)}
    together = planned(blob_dag(), placement={})
    received = [
        link for link in together.chains["w2"].flat if isinstance(link, Recv) and link.edge.by_group
    ]
    assert [link.have for link in received] == [("paint",), ("paint", "paint->look by group")]


def test_a_second_reader_in_the_same_layout_takes_what_has_come():
    dag = blob_dag().add(Node("again", look, role="policy", after="sample", rows=Rows.BALANCED))
    plan = planned(dag)
    assert inputs(plan, "look") == inputs(plan, "again") == {"paint->look by group": True}


def test_in_place_the_table_above_the_expansion_waits_for_its_readers():
    dag = blob_dag(between=[Node("fewer", drop_some, role="rollout", after="sample")])
    plan = planned(dag.replace("look", role="rollout", rows=Rows.ANYWHERE))
    assert inputs(plan, "look") == {"paint": True}
    assert carriers(plan) == {"paint->learn by group"}


def test_an_expansion_that_says_nothing_of_groups_passes_the_blob_on_with_each_row():
    plan = planned(
        blob_dag(sample).replace(
            "sample", fn=unknown_groups, options={"n": 8}, writes=_painted_as()
        )
    )
    assert carriers(plan) == {"sample->look", "look->learn"}


def _painted_as():
    return pa.schema({"painted_as": pa.int64()})


def test_groups_that_are_numbered_anew_go_by_group_from_the_node_that_numbers_them():
    assert carriers(planned(blob_dag(sample_renumbered))) == {
        "sample->look by group",
        "sample->learn by group",
    }


def test_a_plan_shows_groups_and_counts_their_bytes_once_a_worker():
    plan = planned(blob_dag())
    sizes = estimate(plan, SIZES)
    whole = sizes["paint", "look", "by group"]
    assert (whole.rows, whole.bytes) == (BATCH, 2 * BATCH * (SIZE + 24))
    grouped = planned(blob_dag().replace("look", rows=Rows.GROUPED))
    assert estimate(grouped, SIZES)["paint", "look", "by group"].bytes == BATCH * (SIZE + 24)
    text = " ".join(describe(plan, SIZES).split())
    assert "paint -> look 16 by group w0, w1 -> w2, w3 <= 640.8 kB images" in text
    edges = as_data(plan, SIZES)["edges"]
    assert [edge["source"] for edge in edges if edge["by_group"]] == ["paint", "paint"]
    assert "16 groups" in draw({"train": (plan, SIZES)})
    most = max(one.tables for one in usage(plan, SIZES).values())
    assert BATCH * SIZE < most < 4 * BATCH * SIZE  # and not eight times as much


def test_a_saved_table_has_no_blobs_that_rows_share_unless_it_is_told_to():
    assert "images" not in planned(blob_dag()).flow["look"].outputs
    told = planned(blob_dag().replace("look", save_blobs=True)).flow["look"]
    assert told.shared_blobs == ("images",)
    with pytest.raises(PlanError, match="save_blobs=True: expected true or false, and save_as"):
        blob_dag().replace("learn", save_blobs=True)


def test_a_step_goes_on_from_a_stage_that_holds_each_blob_once():
    dag = blob_dag(stage=True)
    # not from the saved table: learn reads images, which it has not
    (cut,) = cuts_at_stored(dag, SCHEMA)
    assert (cut.table, cut.spent) == ("stages/sample", ())
    again = compile_chains(cut.dag, FOUR, pa.schema([]), APART)
    assert carriers(again) == {"sample->look by group", "sample->learn by group"}


def test_nodes_are_run_again_on_stored_rows_that_lack_the_blob_unless_they_read_it():
    dag = blob_dag(between=[Node("between", same, role="policy", after="sample")]).replace(
        "look", fn=same, reads=()
    )
    dag = dag.replace("paint", reads=("picture",)).without("learn")
    stored = pa.schema(
        {
            "row_id": pa.int64(),
            "group_id": pa.int64(),
            "tokens": pa.int64(),
            "painted_as": pa.int64(),
        }
    )
    assert [node.name for node in run_again(dag, stored, "between", "again").dag.nodes] == [
        "stored",
        "between",
        "look",
    ]
    with pytest.raises(
        PlanError, match="'between' takes 'images' as 'paint' makes it, which table 'rollouts'"
    ):
        run_again(dag.replace("between", reads=("images",)), stored, "between", "again")


@pytest.fixture
def data(tmp_path):
    rows = {"prompt": [f"p{i}" for i in range(64)], "answer": [""] * 64}
    pq.write_table(pa.table(rows), tmp_path / "data.parquet", row_group_size=8)
    return Source(
        url=str(tmp_path / "data.parquet"),
        prompt="prompt",
        answer="answer",
        batch_size=BATCH,
        seed=0,
    )


def ran(dag, data, url, workers=FOUR, placement=None):
    schema = source_schema(open_source(data).schema, data)
    with LocalPool(planned(dag, workers, placement, schema), data, url=str(url)) as pool:
        metrics = pool.run()
    return metrics, pq.read_table(f"{url}/rollouts").sort_by("row_id") if (
        url / "rollouts"
    ).exists() else None


PLACES = {
    "one": (("w0",), {}),
    "two": (("w0", "w1"), {}),
    "four": (FOUR, {}),
    "apart": (FOUR, APART),
}
FEWER = [Node("fewer", drop_some, role="policy", after="sample", rows=Rows.GROUPED)]


@pytest.mark.parametrize("make", [sample, sample_unseen, sample_renumbered])
@pytest.mark.parametrize("between", [(), FEWER], ids=["all", "fewer"])
def test_every_row_sees_its_groups_image_and_none_is_copied_for_each_sample(
    data, tmp_path, make, between
):
    tables = []
    for name, (workers, placement) in PLACES.items():
        metrics, table = ran(
            blob_dag(make, between=between), data, tmp_path / name, workers, placement
        )
        tables.append(table)
        assert metrics["look/wrong"].total == 0
        assert metrics["look/rows"].total == table.num_rows
        groups = metrics["look/groups"].total + metrics["learn/groups"].total
        moved = metrics["bytes/by_group"].total if name != "one" else 0
        assert moved <= groups * (SIZE + 200)
        assert moved > 0 or name == "one"
        for node in ("look", "learn"):
            # 8 samples would be 8 times as much
            assert metrics[f"{node}/bytes"].high <= 1.5 * PAINTED * SIZE
    assert all(table == tables[0] for table in tables)
    assert "images" not in tables[0].column_names


def test_a_node_that_breaks_its_word_about_groups_is_named(data, tmp_path):
    with pytest.raises(
        NodeError, match=r"'sample' gave rows of 7 groups that it had none of .*groups='new'"
    ):
        ran(blob_dag(sample_and_lie), data, tmp_path / "lies")


def test_a_stage_has_each_image_in_one_row_of_its_group(data, tmp_path):
    dag = blob_dag(stage=True)
    ran(dag, data, tmp_path / "run")
    stored = pq.read_table(tmp_path / "run" / "stages" / "sample")
    assert stored.num_rows == PAINTED * 8
    assert stored["images"].null_count == PAINTED * 7
