"""Bytes that a worker reads of a dataset, footers included, and bytes that it holds of it."""

from __future__ import annotations

import pickle
import secrets
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from siirl_storage import FooterCache, create_table, open_table
from siirl_storage.counting import count_reads

from siirl_dask.coordinator.dataloader import Dataloader, Source
from siirl_dask.coordinator.source import opened

COLUMNS = ("row_id", "prompt", "answer")
GROUPS, ROWS, BATCH = 32, 64, 32


def rows(count):
    return pa.table(
        {"prompt": [secrets.token_hex(1024) for _ in range(count)], "answer": ["7"] * count}
    )


def folder_of_files(path):
    path.mkdir()
    for part in range(GROUPS):
        pq.write_table(rows(ROWS), path / f"{part:02d}.parquet")


def one_file(path):
    path.mkdir()
    pq.write_table(rows(GROUPS * ROWS), path / "all.parquet", row_group_size=ROWS)


def arrow_files(path):
    path.mkdir()
    for part in range(4):
        with pa.ipc.new_file(str(path / f"{part}.arrow"), rows(1).schema) as writer:
            writer.write_table(rows(GROUPS * ROWS // 4), max_chunksize=ROWS)


def table_of_parts(path):
    create_table(str(path), [rows(GROUPS * ROWS)], rows_per_part=8 * ROWS, rows_per_group=ROWS)


def read_by(dataset, reads, workers):
    """Bytes that each worker reads in an epoch."""
    counts, seen = [], set()
    for index in range(workers):
        reads.clear()
        loader = Dataloader(dataset)
        for step in range(GROUPS * ROWS // BATCH - 1):  # the last one is read ahead
            seen |= {*loader.load(step, COLUMNS, index, workers)["prompt"].to_pylist()}
        loader.close()
        counts.append(reads.bytes_of("/"))
    assert len(seen) == GROUPS * ROWS - BATCH
    return counts


@pytest.mark.parametrize(
    "write", [folder_of_files, one_file, arrow_files, table_of_parts], ids=lambda w: w.__name__
)
def test_each_of_n_workers_reads_about_one_nth_of_a_dataset_footers_included(tmp_path, write):
    write(tmp_path / "rows")
    size = sum(
        file.stat().st_size
        for ending in ("parquet", "arrow")
        for file in tmp_path.rglob(f"*.{ending}")
    )
    reads = count_reads()
    source = Source(
        url=f"counting://{tmp_path}/rows",
        prompt="prompt",
        answer="answer",
        batch_size=BATCH,
        seed=0,
    )
    dataset = opened(source)
    sent = pickle.loads(pickle.dumps(dataset))
    for workers in (1, 2, 4, 8):
        counts = read_by(sent, reads, workers)
        # what a client reads to find them
        footers = 2**16 * GROUPS if write is folder_of_files else 2**16 * 4
        assert max(counts) <= (1.1 * size + footers) / workers + 2 * (size / GROUPS) + 2**16
        assert sum(counts) >= 0.9 * size


def test_a_worker_opens_no_part_but_those_it_reads(tmp_path):
    folder_of_files(tmp_path / "rows")
    reads = count_reads()
    source = Source(
        url=f"counting://{tmp_path}/rows",
        prompt="prompt",
        answer="answer",
        batch_size=BATCH,
        seed=0,
    )
    dataset = opened(source)
    assert len(reads.nbytes) == GROUPS  # the driver looks at each once
    assert max(reads.requests.values()) == 1
    reads.clear()
    loader = Dataloader(pickle.loads(pickle.dumps(dataset)))
    assert not reads.nbytes
    loader.load(0, COLUMNS, 1, 8)
    loader.close()
    assert len(reads.nbytes) <= 5  # its four streams, and one more where ranges meet


def test_a_footer_is_read_once_for_many_row_groups_and_again_when_the_file_is_another(tmp_path):
    one_file(tmp_path / "rows")
    reads = count_reads()
    snapshot = open_table(f"counting://{tmp_path}/rows")
    groups, footers = snapshot.row_groups(), FooterCache()
    reads.clear()
    for group in groups:
        table = snapshot.read_row_group(group, ["answer"], footers=footers)
        assert table.num_rows == ROWS
    assert sum(reads.requests.values()) <= GROUPS + 2
    pq.write_table(
        rows(GROUPS * ROWS),
        tmp_path / "rows" / "all.parquet",
        row_group_size=ROWS,
        compression="none",
    )
    assert (
        snapshot.read_row_group(groups[5], ["answer"], footers=footers)["answer"].to_pylist()
        == ["7"] * ROWS
    )


def test_footers_beyond_the_limit_are_dropped_the_oldest_first(tmp_path):
    folder_of_files(tmp_path / "rows")
    reads = count_reads()
    snapshot = open_table(f"counting://{tmp_path}/rows")
    first, second, *_ = snapshot.row_groups()
    footers = FooterCache(max_bytes=1)
    # requests: a footer, a column
    for group, expected in ((first, 2), (first, 1), (second, 2), (first, 2)):
        reads.clear()
        snapshot.read_row_group(group, ["prompt"], footers=footers)
        assert sum(reads.requests.values()) == expected


_LOADS = """
import resource, sys
from siirl_dask.coordinator.dataloader import Dataloader, Source
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
loader = Dataloader(Source(url=sys.argv[1], prompt="q", answer="a", batch_size=256, seed=0))
for step in range(20):
    assert loader.load(step, ("row_id", "prompt", "answer"), 0, 1).num_rows == 256
loader.close()
print(peak() - before)
"""


@pytest.mark.parametrize("group", [10**6, 8192])
def test_a_dataset_of_ten_million_rows_is_never_in_memory(tmp_path, group):
    """A worker held a permutation of each row group it was in, and a dict of the rows it had
    read: 1.4 GB.
    """
    numbers = pa.array(range(10**6))
    chunk = pa.table({"q": numbers.cast(pa.string()), "a": numbers})
    with pq.ParquetWriter(
        tmp_path / "rows.parquet", chunk.schema, compression="none", use_dictionary=False
    ) as writer:
        for _ in range(10):
            writer.write_table(chunk, row_group_size=group)
    command = [sys.executable, "-c", _LOADS, str(tmp_path / "rows.parquet")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(loaded.stdout) < 150  # MiB; the rows take 220
