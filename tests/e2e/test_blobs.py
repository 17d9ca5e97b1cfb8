"""Images of prompts over processes: each worker gets those of its rows' groups once, and a
replay has them again.
"""

import pyarrow.parquet as pq
import pytest
from siirl_storage import open_table

from siirl_dask.errors import RunError
from siirl_dask.planner import Node, columns
from tests.e2e.blob_dag import SIZE, blob_dag, sample, sample_unseen

PLACES = {
    "one": ("cluster.workers=1", "cluster.placement={}"),
    "together": ("cluster.workers=4", "cluster.placement={}"),
    "apart": ("cluster.workers=4", "cluster.placement={rollout: [0, 1], policy: [2, 3]}"),
}
GIVEN = ("data.batch_size=16", "checkpoint.every=0", "run.steps=2")
PAINTED = 14


@pytest.mark.slow
@pytest.mark.parametrize("make", [sample, sample_unseen])
def test_on_any_workers_rows_see_their_groups_image_and_it_moves_once_a_worker(train, make):
    runs = {
        name: train(name, *GIVEN, *where, dag=lambda config: blob_dag(make))
        for name, where in PLACES.items()
    }
    for step in (1, 2):
        tables = [run.table("rollouts", step) for run in runs.values()]
        assert all(table == tables[0] for table in tables)
        assert set(tables[0]["wrong"].to_pylist()) == {0}
        assert tables[0].num_rows == PAINTED * 8
        assert "images" not in tables[0].column_names
    for name, run in runs.items():
        for metrics in (record["metrics"] for record in run.records()):
            moved = metrics.get("bytes/by_group") or 0
            assert moved <= (metrics["look/groups"] + metrics["learn/groups"]) * (SIZE + 200)
            assert moved <= 2 * PAINTED * (SIZE + 200)  # two workers read them, in two layouts
            assert metrics["bytes/peers"] - moved < PAINTED * SIZE
            assert name == "one" or moved > 0
            assert metrics["look/bytes"] <= 1.5 * PAINTED * SIZE


@columns()
def fail_in_step_2(ctx, table, *, marker):
    from pathlib import Path

    if ctx.step == 2 and not Path(marker).exists():
        Path(marker).touch()
        raise RuntimeError("the plug was pulled")
    return table


@pytest.mark.slow
def test_a_step_that_was_cut_short_goes_on_from_a_stage_with_its_images_on_other_workers(
    train, tmp_path
):
    plug = Node(
        "plug",
        fail_in_step_2,
        role="policy",
        after="sample",
        options={"marker": str(tmp_path / "failed")},
    )

    notes = tmp_path / "painted"

    def dag(config):
        return blob_dag(sample, stage=True, between=[plug]).replace(
            "paint", options={"notes": str(notes)}
        )

    sync = ("storage.durability=sync", "run.max_restarts=0")
    with pytest.raises(RunError, match="the plug was pulled"):
        train("cut", *GIVEN, *PLACES["apart"], *sync, dag=dag)
    stored = pq.read_table(tmp_path / "cut" / "stages" / "sample" / "step=000002")
    assert stored["images"].null_count == PAINTED * 7
    notes.unlink()
    replayed = train("cut", *GIVEN, *PLACES["one"], *sync, dag=dag)
    assert not notes.exists()
    whole = train("whole", *GIVEN, *PLACES["apart"], dag=dag)
    for step in (1, 2):
        again, expected = (
            open_table(f"{run.url}/rollouts/step={step:06d}").to_table()
            for run in (replayed, whole)
        )
        again, expected = again.sort_by("row_id"), expected.sort_by("row_id")
        assert again.select(expected.column_names) == expected
        assert set(again["wrong"].to_pylist()) == {0}
