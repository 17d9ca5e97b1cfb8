"""How many prompts are too long is told before a run starts, from a sample of the dataset."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.coordinator.source import Source
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.driver.prompt_lengths import TooLong, notes_on_long_prompts, sample_lengths
from siirl_dask.planner import Phase
from siirl_dask.tasks.tiny_model import tiny_tokenizer


def source(path):
    return Source(url=str(path), prompt="q", answer="a")


def write(path, lengths, group):
    pq.write_table(pa.table({"q": ["x" * n for n in lengths], "a": [""] * len(lengths)}), path, row_group_size=group)
    return source(path)


def test_a_small_dataset_is_counted_whole(tmp_path):
    sample = sample_lengths(write(tmp_path / "q.parquet", [*range(1, 301)], 50), str.encode, 290)
    assert sample.text(290) == "10 of 300 prompts are longer than data.max_prompt_length=290"


@pytest.mark.parametrize("part", [0.05, 0.5, 0.98])
def test_an_estimate_is_within_its_error_also_where_long_prompts_lie_together(tmp_path, part):
    lengths = np.where(np.random.default_rng(1).random(40_000) < part, 9, 3)
    lengths[:20_000].sort()
    sample = sample_lengths(write(tmp_path / "q.parquet", lengths.tolist(), 400), str.encode, 8)
    assert sample.looked_at == 16 * 32
    found = sample.found / sample.looked_at
    assert abs(found - (lengths > 8).mean()) < 2 * sample._error(found) + 0.01


def test_the_error_is_that_of_row_groups_where_they_differ():
    assert TooLong(10**6, ((32, 32), (32, 0)) * 8)._error(0.5) > 5 * TooLong(10**6, ((32, 16), (32, 16)) * 8)._error(
        0.5
    )


def test_no_long_prompt_among_some_says_how_few_there_can_be(tmp_path):
    sample = sample_lengths(write(tmp_path / "q.parquet", [3] * 40_000, 400), str.encode, 8)
    assert sample.text(8).startswith("fewer than 0.6% of 40,000 prompts are longer than")


def test_long_texts_end_a_sample_early(tmp_path):
    sample = sample_lengths(write(tmp_path / "q.parquet", [1000] * 400, 20), str.encode, 8, characters=5000)
    assert (sample.looked_at, sample.found) == (5, 5)


def test_a_run_tells_of_the_prompts_of_each_source_that_are_too_long(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, lengths in {"short": [1, 2], "long": [9, 1, 12]}.items():
        rows = {"prompt": ["x" * n for n in lengths], "answer": ["y"] * len(lengths)}
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")
    sources = [f"data.sources.{name}.url={tmp_path}/{name}.parquet" for name in ("short", "long")]
    settings = [f"model.path={tmp_path}/model", "data.max_prompt_length=8", "data.url=null", "validation.url=null"]
    file = load_config_file(shipped("quickstart"), [*settings, *sources, "validation.test_url=null"])
    plan, dataset = plan_phases(file.config, *dags(file), worker_names(file.config))[Phase.TRAIN]
    told = "prompts are longer than data.max_prompt_length=8"
    dropped = "; they are dropped from their steps"
    expected = [f"source 'long': 2 of 3 {told}{dropped}", f"source 'short': 0 of 2 {told}"]
    assert notes_on_long_prompts(file.config, plan, dataset) == expected
    file.config.model.path = "nowhere"
    assert notes_on_long_prompts(file.config, plan, dataset) == []
