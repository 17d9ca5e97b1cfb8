"""Files of a source are read, or said not to be: no file of rows is left out without a word, and no
split is trained on that is tested on.
"""

from __future__ import annotations

import bz2

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator import Source, open_source
from siirl_dask.coordinator.source import splits_of
from siirl_dask.datasets import ImportRequest, import_data
from siirl_dask.driver.checks.prompt_rows import check_rows
from siirl_dask.errors import DataError

ROWS = pa.table({"prompt": ["2+2?"], "answer": ["4"]})
LINE = '{"prompt": "2+2?", "answer": "4"}\n'
OTHERS = [
    "b.jsonl.bz2",
    "b.jsonl.xz",
    "b.jsonlines",
    "b.pq",
    "b.parq",
    "b.parquet.gz",
    "b.json.lz4",
]
NO_ROWS = ["README.md", "dataset_info.json", "a.parquet.crc", "LICENSE", "_b.jsonl.bz2", ".b.pq"]


def imported(source, tmp_path):
    remarks = []
    table = import_data(
        ImportRequest(sources=[str(source)], to=str(tmp_path / "table"), remark=remarks.append)
    )
    return table.num_rows, remarks


def source_of(folder):
    return Source(url=str(folder), prompt="prompt", answer="answer")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "rows"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("pattern", ["", "*"])
def test_an_import_says_which_files_of_rows_it_does_not_read(name, pattern, folder, tmp_path):
    (folder / "a.jsonl").write_text(LINE)
    (folder / name).write_bytes(bz2.compress(LINE.encode()))
    rows, (remark,) = imported(folder / pattern, tmp_path)
    assert rows == 1
    assert f"{name}', is of no known kind, and not read" in remark


def test_an_import_of_a_folder_says_nothing_of_files_that_hold_no_rows(folder, tmp_path):
    (folder / "a.csv").write_text("prompt,answer\n2+2?,4\n")
    for name in NO_ROWS:
        (folder / name).write_text("x")
    assert imported(folder, tmp_path) == (1, [])


@pytest.mark.parametrize("name", [*OTHERS, "b.jsonl", "b.csv", "b.CSV.gz"])
def test_a_run_says_which_files_of_rows_it_does_not_read(name, folder):
    pq.write_table(ROWS, folder / "a.parquet")
    (folder / name).write_text(LINE)
    (note,) = check_rows(source_of(folder))
    assert f"1 file there, such as '{name}', is not read" in note
    (folder / name).unlink()
    for other in NO_ROWS:
        (folder / other).write_text("x")
    assert check_rows(source_of(folder)) == []


@pytest.mark.parametrize("name", ["b.PARQUET", "b.Parquet"])
def test_the_case_of_an_ending_leaves_no_file_out(name, folder, tmp_path):
    pq.write_table(ROWS, folder / "a.parquet")
    pq.write_table(ROWS, folder / name)
    assert open_source(source_of(folder)).num_rows == 2
    assert imported(folder, tmp_path) == (2, [])


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"],
        ["train/a.parquet", "validation/a.parquet"],
        ["main/my_train.parquet", "main/my_dev.parquet"],
    ],
)
def test_a_run_refuses_a_folder_with_the_split_that_it_is_tested_on(names, folder):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        pq.write_table(ROWS, folder / name)
    with pytest.raises(DataError, match=r"holds files of several splits \(.*train.*\)"):
        open_source(source_of(folder))
    assert open_source(source_of(folder / names[0])).num_rows == 1


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-0.parquet", "train-1.parquet"], ["train"]),
        (["train_test_mix.parquet"], ["test"]),
        (["latest.parquet", "training.parquet", "a.parquet"], []),
    ],
)
def test_one_split_is_no_other(names, splits):
    assert splits_of(names) == splits


@pytest.mark.parametrize(
    "prompts",
    [
        [["a", "b"]],
        [{"0": "a"}],
        [1],
        [b"a"],
        [{"role": "user", "content": "a"}],
        [[{"from": "human", "value": "a"}]],
    ],
)
def test_prompts_that_no_tokenizer_takes_are_refused_before_a_run(prompts, folder):
    pq.write_table(pa.table({"prompt": prompts, "answer": ["4"]}), folder / "a.parquet")
    with pytest.raises(DataError, match="expected texts, or lists of chat messages"):
        check_rows(source_of(folder))
    assert check_rows(source_of(folder), encoded=False) == []


def test_parts_of_a_content_that_became_json_are_refused_before_a_run(folder):
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": '[{"type": "text", "text": "2+2?"}]'},
    ]
    pq.write_table(pa.table({"prompt": [chat], "answer": ["4"]}), folder / "a.parquet")
    with pytest.raises(DataError, match="a list of parts that became JSON"):
        check_rows(source_of(folder))


def test_chats_that_became_json_are_refused_before_a_run(folder):
    prompts = ['[{"role": "user", "content": "2+2?"}]'] * 2
    pq.write_table(pa.table({"prompt": prompts, "answer": ["4"] * 2}), folder / "a.parquet")
    with pytest.raises(DataError, match="lists of chat messages were made text"):
        check_rows(source_of(folder))
