"""Measures ``siirl-dask data import`` beside a plain rewrite with pyarrow, in turns, in one run.

    python benchmarks/data_import.py [--megabytes 400] [--rounds 3] [--out docs/benchmarks/data_import.md]

The plain rewrite reads the same file with pyarrow alone and writes Parquet with the same settings: zstd, page
checksums, row groups of the same rows. It checks nothing, syncs nothing to the disk, and commits nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
from siirl_storage import ROWS_PER_GROUP, open_table

from siirl_dask.datasets import ImportRequest, import_data

WORDS = [f"{number:x}" for number in range(0, 400_000, 7)]
SETTINGS = {"compression": "zstd", "write_page_checksum": True}
IMAGE_BYTES = 100_000


@dataclass(frozen=True)
class Case:
    name: str
    source: Path
    read: Callable[[], Iterator[pa.RecordBatch]]
    rows_per_group: int


def chats(megabytes: int) -> pa.Table:
    """Chat messages of some 1,500 characters, with an answer, in verl's layout."""
    draw = random.Random(0)
    rows = [
        {
            "prompt": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=250))}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        for number in range(megabytes * 1_000_000 // 1_450)
    ]
    return pa.Table.from_pylist(rows)


def images(megabytes: int) -> pa.Table:
    """Blobs that do not compress, with a text."""
    count = megabytes * 1_000_000 // IMAGE_BYTES
    return pa.table(
        {
            "prompt": ["What is this?"] * count,
            "image": [os.urandom(IMAGE_BYTES) for _ in range(count)],
        }
    )


def read_parquet(path: Path) -> Iterator[pa.RecordBatch]:
    yield from pq.ParquetFile(path).iter_batches(4096)


def read_json(path: Path) -> Iterator[pa.RecordBatch]:
    yield from pj.open_json(path, read_options=pj.ReadOptions(block_size=2**24))


def make_cases(folder: Path, megabytes: int) -> list[Case]:
    """Write the sources."""
    texts, blobs = chats(megabytes), images(megabytes)
    pq.write_table(texts, folder / "texts.parquet", **SETTINGS)
    pq.write_table(blobs, folder / "images.parquet", row_group_size=1000, **SETTINGS)
    with (folder / "texts.jsonl").open("w") as file:
        file.writelines(
            json.dumps(row) + "\n" for batch in texts.to_batches(1024) for row in batch.to_pylist()
        )
    parquet, pictures, lines = (
        folder / name for name in ("texts.parquet", "images.parquet", "texts.jsonl")
    )
    in_group = 2**24 // IMAGE_BYTES
    return [
        Case("chat messages, Parquet", parquet, partial(read_parquet, parquet), ROWS_PER_GROUP),
        Case("chat messages, JSON Lines", lines, partial(read_json, lines), ROWS_PER_GROUP),
        Case("images of 100 kB, Parquet", pictures, partial(read_parquet, pictures), in_group),
    ]


def rewrite(case: Case, to: Path) -> None:
    """Write the rows of a case with pyarrow alone."""
    writer = None
    for batch in case.read():
        writer = writer or pq.ParquetWriter(to, batch.schema, **SETTINGS)
        writer.write_batch(batch, row_group_size=case.rows_per_group)
    assert writer is not None
    writer.close()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of the clock, and of all cores."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def measure(case: Case, folder: Path) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the seconds of the plain rewrite and of the import, once both gave the same rows."""
    plain, table = folder / "plain.parquet", folder / "table"
    shutil.rmtree(table, ignore_errors=True)
    theirs = timed(lambda: rewrite(case, plain))
    ours = timed(lambda: import_data(ImportRequest(sources=[str(case.source)], to=str(table))))
    made, expected = open_table(str(table)), pq.ParquetFile(plain).metadata.num_rows
    assert made.num_rows == expected
    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = make_cases(folder, options.megabytes)
        rounds = [[measure(case, folder) for case in cases] for _ in range(options.rounds)]
        sizes = [case.source.stat().st_size for case in cases]
    page = report(options, [case.name for case in cases], sizes, rounds)
    print(page)
    if options.out:
        options.out.write_text(page)


Rounds = list[list[tuple[tuple[float, float], tuple[float, float]]]]


def report(options: argparse.Namespace, names: list[str], sizes: list[int], rounds: Rounds) -> str:
    """Return the page."""
    lines = [
        "| source | file, MB | plain pyarrow, MB/s | import, MB/s | import over plain | CPU s a "
        "GB, plain | import |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    megabytes = options.megabytes
    for index, name in enumerate(names):
        plain, ours = zip(*(measured[index] for measured in rounds), strict=True)
        ratios = [theirs[0] / own[0] for theirs, own in zip(plain, ours, strict=True)]
        speeds = [
            megabytes / statistics.median(seconds for seconds, _ in side) for side in (plain, ours)
        ]
        cpu = [
            statistics.median(seconds for _, seconds in side) * 1000 / megabytes
            for side in (plain, ours)
        ]
        lines.append(
            f"| {name} | {sizes[index] / 1e6:,.0f} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{cpu[0]:.1f} | {cpu[1]:.1f} |"
        )
    table = "\n".join(lines)
    return f"""\
# Importing data

`siirl-dask data import` beside a plain rewrite: pyarrow reads the same file and writes Parquet with the same settings
(zstd, page checksums, row groups of the same rows), on the same disk. MB are those of the rows in memory, {megabytes} a
case. Medians of {options.rounds} rounds, in turns, in one process; the ratio is the median of the rounds', with the
least and the most.

The import does what the rewrite does not: it validates every text and offset, keeps row groups to 16 MiB, refuses or
keeps as text what of JSON would come back otherwise than it is written, syncs each part to the disk, and commits. It
encodes and writes in a second thread, where the rewrite has one.

{table}

Measured on {date.today():%d %B %Y} on {os.cpu_count()} cores, {platform.system()} {platform.machine()}, load
{os.getloadavg()[0]:.1f}, pyarrow {pa.__version__}. To repeat it:

    python benchmarks/data_import.py --megabytes {megabytes} --rounds {options.rounds} --out FILE
"""


if __name__ == "__main__":
    main()
