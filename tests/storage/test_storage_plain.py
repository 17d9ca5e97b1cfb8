"""Files that somebody else wrote, and our files read by somebody else."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from siirl_storage import (
    CorruptPart,
    StorageError,
    TableNotFound,
    append,
    create_table,
    join,
    open_fs,
    open_table,
    stage,
    write_part,
)
from siirl_storage.conformance import sample


def put(url: str, table: pa.Table, **options: object) -> None:
    fs, path = open_fs(url)
    sink = pa.BufferOutputStream()
    if url.endswith(".feather"):
        pyarrow.feather.write_feather(table, sink)
    else:
        pq.write_table(table, sink, **options)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, sink.getvalue().to_pybytes())


def test_plain_folder_reads_in_path_order_and_skips_what_is_hidden(url: str) -> None:
    put(join(url, "b.parquet"), sample(5, 5), row_group_size=2)
    put(join(url, "a.parquet"), sample(0, 5), row_group_size=3)
    put(join(url, "c/d.feather"), sample(10, 5))
    for hidden in ("_SUCCESS.parquet", ".x.parquet", "_tmp/x.parquet", "a/.cache/x.parquet"):
        put(join(url, hidden), sample(99, 1))
    fs, root = open_fs(url)
    fs.pipe_file(f"{root}/README.md", b"not a part")
    snapshot = open_table(url)
    assert (snapshot.version, snapshot.num_rows) == (None, 15)
    assert [(g.part, g.rows) for g in snapshot.row_groups()] == [
        ("a.parquet", 3),
        ("a.parquet", 2),
        ("b.parquet", 2),
        ("b.parquet", 2),
        ("b.parquet", 1),
        ("c/d.feather", 5),
    ]
    assert snapshot.to_table().equals(sample(0, 15))
    assert snapshot.dataset().to_table().equals(sample(0, 15))


@pytest.mark.parametrize("name", ["one.parquet", "one.feather", "deeper/one.parquet"])
def test_single_file_is_a_table(url: str, name: str) -> None:
    place = join(url, name)
    put(place, sample(0, 5))
    snapshot = open_table(place)
    assert snapshot.urls == [place]
    assert open_table(snapshot.url, snapshot.version).to_table().equals(sample(0, 5))
    assert snapshot.dataset().to_table(columns=["row"]).num_rows == 5


def test_folder_names_become_columns(url: str) -> None:
    for step in (9, 10):
        write_part(join(url, f"step={step:06d}", "split=a%20b"), 0, 1, sample(step, 2))
    snapshot = open_table(url)
    table = snapshot.to_table(["step", "row", "split"])
    assert table.schema.types == [pa.int64(), pa.int64(), pa.string()]
    assert table.to_pydict() == {
        "step": [9, 9, 10, 10],
        "row": [9, 10, 10, 11],
        "split": ["a b"] * 4,
    }
    dataset = snapshot.dataset()
    assert dataset.to_table(columns=["step", "row", "split"]).equals(table)
    assert dataset.filter(ds.field("step") == 10).count_rows() == 2
    assert duckdb.sql(
        "select step, sum(row) from dataset group by step order by step"
    ).fetchall() == [
        (9, 19),
        (10, 21),
    ]


def test_folder_names_that_are_no_integers_or_null_stay_strings(url: str) -> None:
    for value in ("1", "x", "__HIVE_DEFAULT_PARTITION__"):
        put(join(url, f"key={value}", "part.parquet"), sample(0, 1))
    assert open_table(url).to_table()["key"].to_pylist() == ["1", None, "x"]
    assert open_table(url).dataset().to_table()["key"].to_pylist() == ["1", None, "x"]


def test_a_column_in_the_file_beats_the_folder_name(url: str) -> None:
    put(join(url, "row=7", "part.parquet"), sample(0, 2))
    assert open_table(url).to_table()["row"].to_pylist() == [0, 1]


def test_column_without_values_takes_the_type_of_the_others(url: str) -> None:
    put(join(url, "a.parquet"), pa.table({"x": [1], "note": pa.nulls(1)}))
    put(join(url, "b.parquet"), pa.table({"note": ["hi"], "x": [2]}))
    put(join(url, "c.parquet"), pa.table({"x": pa.nulls(1), "note": pa.nulls(1)}))
    expected = {"x": [1, 2, None], "note": [None, "hi", None]}
    assert open_table(url).to_table().to_pydict() == expected
    assert open_table(url).dataset().to_table().to_pydict() == expected


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (pa.table({"x": ["1"], "y": [1]}), "'x' as string, not int64"),
        (pa.table({"x": [1]}), "lacks column 'y'"),
        (pa.table({"x": [1], "y": [1], "z": [1]}), "has a column 'z'"),
    ],
)
def test_files_that_disagree_are_refused_by_name(url: str, other: pa.Table, words: str) -> None:
    put(join(url, "a.parquet"), pa.table({"x": [1], "y": [1]}))
    put(join(url, "b.parquet"), other)
    with pytest.raises(
        StorageError, match=rf"b\.parquet does not go with a\.parquet: it .*{words}"
    ):
        open_table(url)


def test_nothing_there_says_what_was_looked_for(url: str) -> None:
    with pytest.raises(
        TableNotFound, match=r"looked for a snapshot in _snapshots/.*\.parquet.*no files at all"
    ):
        open_table(url)
    fs, root = open_fs(url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/data.csv", b"1,2")
    with pytest.raises(TableNotFound, match="found 1 other files"):
        open_table(url)
    with pytest.raises(TableNotFound, match="found 1 other files"):
        open_table(join(url, "data.csv"))
    with pytest.raises(TableNotFound, match=r"no snapshot 3 .*versions there: none"):
        open_table(url, 3)
    with pytest.raises(TableNotFound, match=r"no snapshot 3 .*versions there: none"):
        open_table(join(url, "data.csv"), 3)


def test_staged_parts_are_never_taken_for_plain_files(url: str) -> None:
    stage(url, sample(0, 5))
    with pytest.raises(TableNotFound, match="nobody has committed"):
        open_table(url)
    put(join(url, "plain.parquet"), sample(5, 5))
    assert open_table(url).to_table().equals(sample(5, 5))


def test_foreign_file_that_was_replaced_after_opening_is_noticed(url: str) -> None:
    put(join(url, "a.parquet"), sample(0, 5))
    snapshot = open_table(url)
    put(join(url, "a.parquet"), sample(0, 6))
    with pytest.raises(CorruptPart, match="has 6 rows in 1 row groups, and should have 5 in 1"):
        snapshot.to_table()


def test_other_tools_read_our_parts_without_us(tmp_path: Path) -> None:
    create_table(str(tmp_path), [sample(0, 50)], rows_per_part=20)
    append(str(tmp_path), [sample(50, 10)])
    urls = open_table(str(tmp_path)).urls
    assert pa.concat_tables([pq.read_table(url) for url in urls]).equals(sample(0, 60))
    # skips _snapshots by itself
    assert ds.dataset(str(tmp_path), format="parquet").count_rows() == 60
    tokens = sum(len(ids or []) for ids in sample(0, 60)["ids"].to_pylist())
    assert duckdb.read_parquet(urls).aggregate(
        "sum(row), sum(len(ids)), count(text)"
    ).fetchall() == [(1770, tokens, 40)]
    assert duckdb.sql(f"select count(*) from '{tmp_path}/data/*.parquet'").fetchall() == [(60,)]
    write_part(str(tmp_path / "arrow"), 0, 1, sample(0, 5), format="arrow")
    assert (
        pa.ipc.open_file(str(tmp_path / "arrow/part-00000-of-00001.arrow"))
        .read_all()
        .equals(sample(0, 5))
    )
