"""Rows are read batch by batch, and a file that unpacks to more than the reader allows is
refused before it does.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from siirl_storage import (
    Conflict,
    Snapshot,
    StorageError,
    TooLarge,
    commit,
    create_table,
    open_table,
    stage,
    write_part,
)
from siirl_storage.conformance import sample
from siirl_storage.formats import Format

BOUND = 2**22


def zeros(count: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(bytes(8 * count))])


def one_list(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), zeros(count))


def repeated(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        zeros(count).cast(pa.int32()), pa.array([text], pa.large_string())
    )


BOMBS = {
    "numbers": lambda: zeros(2**22),
    "one list": lambda: one_list(2**22),
    "nulls": lambda: pa.nulls(2**22),
    "one text over and over": lambda: repeated("x" * 2**16, 2**12).cast(pa.large_string()),
    "a long text": lambda: pa.array(["x" * 2**25], pa.large_string()),
}


def bomb(folder: Path, kind: str) -> Snapshot:
    array = BOMBS[kind]()
    path = folder / "bomb.parquet"
    pq.write_table(
        pa.table({"a": array}),
        path,
        compression="zstd",
        row_group_size=2**30,
        dictionary_pagesize_limit=2**30,
    )
    assert path.stat().st_size < array.nbytes / 100 or kind == "nulls"
    return open_table(str(path))


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_that_unpacks_to_more_than_the_bound_is_refused_without_unpacking_it(
    tmp_path: Path, kind: str
) -> None:
    snapshot = bomb(tmp_path, kind)
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), pool.max_memory()
    for read in (
        lambda: snapshot.read_row_group(snapshot.row_groups()[0], max_bytes=BOUND),
        lambda: snapshot.to_table(max_bytes=BOUND),
    ):
        with pytest.raises(
            TooLarge, match=r"row group 0 of .*bomb\.parquet takes at least \d+ .*at most 4194304"
        ):
            read()
    # Of a text that is stored once, one batch may come out before it is counted.
    assert pool.max_memory() <= max(most, before + 4 * BOUND)


def test_an_arrow_file_that_unpacks_to_more_than_the_bound_is_refused(tmp_path: Path) -> None:
    create_table(str(tmp_path / "t"), [pa.table({"a": zeros(2**16)})] * 16, format=Format.ARROW)
    with pytest.raises(TooLarge, match="at most 4194304"):
        open_table(str(tmp_path / "t")).to_table(max_bytes=BOUND)


def test_the_bound_is_of_all_row_groups_of_a_table(tmp_path: Path) -> None:
    create_table(str(tmp_path), [pa.table({"a": zeros(2**17)})] * 8)
    assert open_table(str(tmp_path)).to_table(max_bytes=2**24).num_rows == 2**20
    with pytest.raises(TooLarge, match=f"{tmp_path} takes at least .* at most 4194304"):
        open_table(str(tmp_path)).to_table(max_bytes=BOUND)


def test_an_error_of_size_survives_a_trip_between_processes() -> None:
    error = pickle.loads(pickle.dumps(TooLarge("row group 0 of x", 9, 8)))
    assert (error.nbytes, error.bound, str(error)) == (
        9,
        8,
        str(TooLarge("row group 0 of x", 9, 8)),
    )


@pytest.mark.parametrize("format", list(Format))
def test_the_rows_that_are_asked_for_come_and_no_others(tmp_path: Path, format: Format) -> None:
    create_table(str(tmp_path), [sample(0, 100)], format=format, rows_per_group=60)
    snapshot = open_table(str(tmp_path))
    first, second = snapshot.row_groups()
    assert snapshot.read_row_group(first, rows=[0, 7, 59]).equals(sample(0, 100).take([0, 7, 59]))
    assert snapshot.read_row_group(second, ["text"], rows=[39]).equals(
        sample(99, 1).select(["text"])
    )
    assert snapshot.read_row_group(second, rows=[]).num_rows == 0
    for rows in ([3, 3], [4, 3], [-1], [40]):
        with pytest.raises(StorageError, match="expected ascending row numbers"):
            snapshot.read_row_group(second, rows=rows)


def test_one_row_of_a_large_row_group_takes_the_memory_of_a_batch_and_its_pages(
    tmp_path: Path,
) -> None:
    blobs = pa.table({"a": [bytes([number % 251]) * 2**20 for number in range(64)]})
    small_pages = {"write_batch_size": 4, "compression": "none", "use_dictionary": False}
    pq.write_table(blobs, tmp_path / "a.parquet", row_group_size=64, **small_pages)
    snapshot, row = open_table(str(tmp_path)), blobs.take([50])
    expected = blobs.nbytes
    del blobs
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), pool.max_memory()
    assert snapshot.read_row_group(snapshot.row_groups()[0], rows=[50]).equals(row)
    assert pool.max_memory() <= max(most, before + expected // 2)
    assert pool.bytes_allocated() - before < 2**21


@pytest.mark.parametrize("kind", [Format.PARQUET, Format.ARROW])
def test_batches_give_every_row_in_order_with_the_columns_of_folders(
    kind: Format, tmp_path: Path
) -> None:
    for step in (3, 7):
        (tmp_path / f"step={step}").mkdir()
        write_part(
            str(tmp_path / f"step={step}"), 0, 1, sample(0, 50), format=kind, rows_per_group=7
        )
    table = open_table(str(tmp_path))
    assert pa.Table.from_batches(table.batches()).equals(table.to_table().combine_chunks())
    steps = pa.Table.from_batches(table.batches(["step"]))["step"].to_pylist()
    assert steps == [3] * 50 + [7] * 50


def test_a_text_that_is_stored_once_does_not_make_a_batch_larger_than_the_bound(
    tmp_path: Path,
) -> None:
    pq.write_table(
        pa.table({"text": repeated("x" * 2**20, 600)}), tmp_path / "a.parquet", store_schema=False
    )
    batches = open_table(str(tmp_path / "a.parquet")).batches(max_bytes=2**27)
    sizes = [(batch.num_rows, batch.nbytes) for batch in batches]
    assert sum(rows for rows, _ in sizes) == 600
    assert max(nbytes for _, nbytes in sizes) <= 2**27
    with pytest.raises(TooLarge, match="Write it with smaller row groups"):
        list(open_table(str(tmp_path / "a.parquet")).batches(max_bytes=2**20))


def test_a_commit_of_a_new_table_is_refused_where_there_is_one(tmp_path: Path) -> None:
    url = str(tmp_path / "table")
    parts = [stage(url, sample(0, 5)) for _ in range(2)]
    assert commit(url, parts[:1], new=True).version == 1
    with pytest.raises(Conflict):
        commit(url, parts[1:], new=True)
    assert commit(url, parts[1:]).num_rows == 10
