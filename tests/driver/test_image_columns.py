"""Images are looked for before a run starts: their column, and how many prompts are too long
with them.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.checks.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.planner import Phase
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from tests.images.pictures import png


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vlm(tmp_path_factory.mktemp("model"))


def planned(tmp_path, folder, images, *overrides, config="quickstart_vlm.yaml", prompts=None):
    rows = {
        "prompt": prompts or ["<image>how many?"] * len(images),
        "answer": ["1"] * len(images),
        "images": images,
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=4)
    given = [f"data.url={tmp_path / 'rows.parquet'}", "data.prepare=null", "validation.url=null"]
    given += ["validation.test_url=null", f"model.path={folder}", *overrides]
    file = load_config_file(shipped(config), given)
    phases = plan_phases(file.config, *dags(file), worker_names(file.config))
    return file.config, phases[Phase.TRAIN]


FILES = pa.array([[png(16, 16)]] * 8)


@pytest.mark.parametrize(
    ("images", "override", "said"),
    [
        (
            FILES,
            "images.column=image",
            r"images.column='image': the column of .* is not there .*did you mean 'images'",
        ),
        (
            pa.array([1] * 8),
            "images.most=1",
            r"images.column='images': the column of .*rows.parquet' has type int64",
        ),
    ],
)
def test_a_dataset_without_images_is_refused_by_its_column(
    tmp_path, folder, images, override, said
):
    with pytest.raises(DataError, match=said):
        planned(tmp_path, folder, images, override)


def test_a_dag_that_reads_no_images_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"images.column='images' and no node reads that column"):
        planned(tmp_path, folder, FILES, "nodes.prompts.with.images=null")


def test_a_plan_knows_the_column_of_a_dataset_that_is_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = load_config_file(shipped("quickstart_vlm.yaml"))
    phases = plan_phases(file.config, *dags(file), worker_names(file.config), assume_columns=True)
    assert phases[Phase.TRAIN][0].chains


@pytest.mark.parametrize(("limit", "said"), [(40, "about 14.3% "), (400, "fewer than 42.9% ")])
def test_prompts_are_counted_with_their_images_and_what_cannot_be_is_left_out(
    tmp_path, folder, limit, said
):
    images = pa.array([[png(16, 16)]] * 6 + [[png(64, 64)]] + [[b"no image"]])
    config, (plan, dataset) = planned(tmp_path, folder, images, f"data.max_prompt_length={limit}")
    on_texts, note = notes_on_long_prompts(config, plan, dataset)
    assert "chat template" in on_texts
    assert note.startswith(said)
    assert "of 8 prompts" in note
    assert "judged by 7 of them" in note
    assert ("they are dropped" in note) is (limit == 40)


def loaded(plan):
    return {
        name
        for node_columns in plan.flow.values()
        if not node_columns.node.after
        for name in node_columns.needed
    }


def test_a_run_of_texts_loads_no_column_that_is_called_images_and_stores_it_nowhere(
    tmp_path, folder
):
    seen, _ = planned(tmp_path, folder, FILES)[1]
    assert "images" in loaded(seen)
    for config, text in (
        ("quickstart_vlm.yaml", "images.column=null"),
        ("quickstart_turns.yaml", "run.steps=1"),
    ):
        plan, _ = planned(tmp_path, folder, FILES, text, config=config)[1]
        assert "images" not in loaded(plan)
        assert not any("images" in node_columns.reads for node_columns in plan.flow.values())
    asked, _ = planned(
        tmp_path, folder, FILES, "images.column=null", "nodes.reward.with.columns=[images]"
    )[1]
    assert "images" in loaded(asked)
    assert {
        name for name, node_columns in asked.flow.items() if "images" in node_columns.reads
    } == {"reward"}


def test_environments_that_show_images_need_a_node_that_plays_with_them(tmp_path, folder):
    with pytest.raises(
        ConfigError, match=r"images.observations=true and no node plays with images"
    ):
        planned(tmp_path, folder, FILES, "images.observations=true")
    given = ("images={column: null, observations: true}", "run.steps=1")
    _, (plan, _) = planned(tmp_path, folder, FILES, *given, config="quickstart_turns.yaml")
    assert {
        name for name, node_columns in plan.flow.items() if "observed_images" in node_columns.reads
    } == {
        "old_logprobs",
        "update",
    }
