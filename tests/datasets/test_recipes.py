"""Recipes write what their reward and the dataloader expect, from files of the datasets' own
schemas.
"""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from siirl_storage import open_table

from siirl_dask import datasets
from siirl_dask.config import Config, DataConfig, ValidationConfig
from siirl_dask.coordinator.dataloader import Source, open_source
from siirl_dask.driver.phases import prepare
from siirl_dask.errors import DataError, PlanError
from siirl_dask.rewards import dapo_math, gsm8k, math_answer
from tests.hub import hub

PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)
IMAGE = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def write_gsm8k(folder, answers=("it is 1,\n#### 1,200", "#### -3")):
    rows = pa.table(
        {"question": [f"question {at}?" for at in range(len(answers))], "answer": list(answers)}
    )
    (folder / "main").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(rows, folder / "main" / f"{split}-00000-of-00001.parquet")
    return folder


def configured(folder, recipe, **options):
    return Config(
        data=DataConfig(
            url=str(folder / "train"),
            prepare=f"siirl_dask.datasets:{recipe}",
            prepare_options=options,
        ),
        validation=ValidationConfig(url=str(folder / "validation"), test_url=str(folder / "test")),
    )


def rows_at(config):
    """Return the training rows, which the dataloader must be able to load with its default keys."""
    assert open_source(Source.of(config.data)).num_rows
    return open_table(config.data.url).to_table().to_pylist()


FROM_THE_HUB = """
import sys
from siirl_dask.config import Config, DataConfig, ValidationConfig
from siirl_dask.datasets import gsm8k
gsm8k(Config(data=DataConfig(url=sys.argv[1]), validation=ValidationConfig(url=sys.argv[2])))
"""


def test_gsm8k_comes_from_a_hub(tmp_path):
    write_gsm8k(tmp_path / "hub" / "datasets" / "openai" / "gsm8k")
    config = configured(tmp_path, "gsm8k")
    with hub(tmp_path / "hub") as (endpoint, asked):
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
        }
        urls = [config.data.url, config.validation.url]
        subprocess.run(
            [sys.executable, "-c", FROM_THE_HUB, *urls], env=environment, check=True, timeout=60
        )
        assert set(asked) == {
            "main/train-00000-of-00001.parquet",
            "main/test-00000-of-00001.parquet",
        }
    first, second = rows_at(config)
    assert first["prompt"] == [
        {
            "role": "user",
            "content": 'question 0? Let\'s think step by step and output the final answer after "####".',
        }
    ]
    assert (first["answer"], second["answer"]) == ("1200", "-3")
    assert gsm8k(first["prompt"], "so #### 1200", first["answer"]) == 1.0
    assert open_table(config.validation.url).num_rows == 2


def test_math_is_read_from_an_array_and_from_lines(tmp_path):
    problem = {"problem": "What is $1/2$?", "answer": r"\frac{1}{2}", "solution": "half"}
    (tmp_path / "deepscaler.json").write_text(
        json.dumps([problem, {**problem, "answer": 3}], indent=2)
    )
    (tmp_path / "test.jsonl").write_text(
        json.dumps({**problem, "subject": "Algebra", "level": 1, "unique_id": "a"})
    )
    config = configured(tmp_path, "math", source=str(tmp_path), validation_source=str(tmp_path))
    assert prepare(config)
    first, second = rows_at(config)
    assert second["answer"] == "3"
    assert math_answer("p", r"\boxed{0.5}", first["answer"]) == 1.0
    assert r"\boxed{}" in first["prompt"][0]["content"]
    (only,) = open_table(config.validation.url).to_table().to_pylist()
    assert (only["answer"], only["data_source"]) == (problem["answer"], "math_500")


def test_dapo_has_each_problem_once(tmp_path):
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"problem {at % 5}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(at % 5), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{at % 5}"},
        }
        for at in range(500)
    ]
    (tmp_path / "data").mkdir()
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "data" / "dapo-math-17k.parquet", row_group_size=7
    )
    config = configured(tmp_path, "dapo_17k", source=str(tmp_path))
    assert prepare(config)
    found = rows_at(config)
    assert [row["answer"] for row in found] == list("01234")
    assert found[3]["prompt"] == [{"role": "user", "content": "problem 3"}]
    assert dapo_math("p", "Answer: 3", found[3]["answer"]) == 1.0


def test_geometry3k_has_images_in_small_row_groups(tmp_path):
    (tmp_path / "data").mkdir()
    for split, count in {"train": 5, "validation": 2, "test": 1}.items():
        rows = {
            "images": pa.array([[{"bytes": PNG * 20_000, "path": None}]] * count, IMAGE),
            "problem": ["<image>Find x."] * count,
            "answer": [str(at) for at in range(count)],
        }
        pq.write_table(pa.table(rows), tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    config = configured(tmp_path, "geometry3k", source=str(tmp_path))
    assert prepare(config)
    found = rows_at(config)
    assert all(row["images"] == [PNG * 20_000] for row in found)
    assert found[0]["prompt"][0]["content"].startswith("<image>Find x. You FIRST think")
    assert len(open_table(config.data.url).row_groups()) == 5 * len(PNG) * 20_000 // 2**22 + 1
    assert [
        open_table(url).num_rows for url in (config.validation.url, config.validation.test_url)
    ] == [2, 1]


def test_a_recipe_that_fails_leaves_no_training_data(tmp_path):
    folder = write_gsm8k(tmp_path / "gsm8k", answers=("#### 1", "no number"))
    config = configured(tmp_path, "gsm8k", source=str(folder))
    with pytest.raises(
        DataError, match="expected a solution that ends with '#### ' and a number, not 'no number'"
    ):
        prepare(config)
    pq.write_table(pa.table({"text": ["x"]}), folder / "main" / "test-00000-of-00001.parquet")
    with pytest.raises(
        DataError, match=r"lacks a column that its recipe expects: .*answer.*there is: \['text'\]"
    ):
        prepare(config)
    assert not (tmp_path / "train" / "_snapshots").exists()


def test_an_option_that_no_recipe_has_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(PlanError, match="did you mean 'source'"):
        prepare(configured(tmp_path, "gsm8k", sourc="x"))


def test_every_recipe_is_exported():
    assert {"gsm8k", "math", "dapo_17k", "geometry3k"} <= set(datasets.__all__)
