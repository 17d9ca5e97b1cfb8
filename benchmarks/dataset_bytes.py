"""Counts the bytes of a dataset that each of N workers reads in an epoch, footers included.

    python benchmarks/dataset_bytes.py --out docs/benchmarks/dataset_bytes.md

Each worker is a Dataloader on a filesystem that counts, one after the other in this process. The
driver opens the dataset, and is counted apart.
"""

from __future__ import annotations

import argparse
import pickle
import secrets
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from siirl_storage import Part, Snapshot, create_table
from siirl_storage.counting import Reads, count_reads

from siirl_dask.coordinator import Dataset, Mixture, Source, opened
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.coordinator.source import Share

WORKERS = (1, 2, 4, 8)
GROUPS, ROWS, PROMPT = 64, 512, 1024  # row groups, rows of each, bytes of a prompt
BATCH = 128
COLUMNS = ("row_id", "group_id", "tokens", "prompt", "answer")
START = "<!-- from here on by hand -->"


def table(rows: int) -> pa.Table:
    return pa.table(
        {"prompt": [secrets.token_hex(PROMPT // 2) for _ in range(rows)], "answer": ["7"] * rows}
    )


def write_folder(path: Path) -> None:
    """Write a part for each row group, as other tools do."""
    path.mkdir()
    for part in range(GROUPS):
        pq.write_table(table(ROWS), path / f"part-{part:04d}.parquet", row_group_size=ROWS)


def write_file(path: Path) -> None:
    path.mkdir()
    pq.write_table(table(GROUPS * ROWS), path / "all.parquet", row_group_size=ROWS)


def write_table(path: Path) -> None:
    create_table(str(path), [table(GROUPS * ROWS)], rows_per_part=8 * ROWS, rows_per_group=ROWS)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    f"a folder of {GROUPS} files": write_folder,
    f"one file of {GROUPS} row groups": write_file,
    "a table of siirl_storage, 8 parts": write_table,
}


def source(path: Path) -> Source:
    return Source(
        url=f"counting://{path}", prompt="prompt", answer="answer", batch_size=BATCH, seed=0
    )


def bytes_by_worker(
    dataset: Dataset, reads: Reads, workers: int, steps: int
) -> tuple[int, list[int]]:
    """Return the bytes that the driver read to open the dataset, and those of each worker in its
    steps.
    """
    reads.clear()
    ready = opened(dataset)
    driver = reads.bytes_of("/")
    counts = []
    for index in range(workers):
        reads.clear()
        loader = Dataloader(ready)
        # which reads the last one ahead, and with that one the next epoch's first
        for step in range(steps - 1):
            loader.load(step, COLUMNS, index, workers)
        loader.close()
        counts.append(reads.bytes_of("/"))
    return driver, counts


def row(name: str, size: int, measured: Sequence[tuple[int, list[int]]]) -> str:
    cells = [f"{max(counts) / size:.3f} ({sum(counts) / size:.2f})" for _, counts in measured]
    return f"| {name} | {size / 1e6:.1f} | {measured[0][0] / 1e6:.2f} | {' | '.join(cells)} |"


def index_bytes(parts: int, groups: int) -> str:
    """Return the size of an open table as workers get it."""
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string()})
    listed = tuple(
        Part(f"part-{n:05d}-of-{parts:05d}.parquet", 10**7 + n, (1024,) * groups)
        for n in range(parts)
    )
    data = pickle.dumps(Snapshot("s3://bucket/rows", None, schema, listed, base="s3://bucket/rows"))
    return f"{len(data) / 1e6:.2f} MB, {len(zlib.compress(data)) / 1e6:.2f} MB as it is sent"


def page() -> str:
    steps = GROUPS * ROWS // BATCH
    rows = []
    with TemporaryDirectory() as folder:
        reads = count_reads()
        for name, write in LAYOUTS.items():
            path = Path(folder) / secrets.token_hex(4)
            write(path)
            size = sum(file.stat().st_size for file in path.rglob("*.parquet"))
            rows.append(
                row(name, size, [bytes_by_worker(source(path), reads, n, steps) for n in WORKERS])
            )
        first, second = (Path(folder) / name for name in ("first", "second"))
        write_folder(first)
        write_table(second)
        size = sum(
            file.stat().st_size for place in (first, second) for file in place.rglob("*.parquet")
        )
        shares = (Share("a", Fraction(1), source(first)), Share("b", Fraction(1), source(second)))
        mixture = Mixture(shares=shares, batch_size=BATCH, seed=0)
        measured = [bytes_by_worker(mixture, reads, n, 2 * steps) for n in WORKERS]
        rows.append(row("the first and the third, mixed 1:1", size, measured))
    heads = " | ".join(f"N = {n}" for n in WORKERS)
    return "\n".join(
        [
            "# Bytes of a dataset that each worker reads\n",
            f"`python benchmarks/dataset_bytes.py`: {GROUPS * ROWS:,} prompts of {PROMPT} bytes, "
            f"{BATCH} a step, one epoch. A cell is what the worker that reads most reads, as a "
            "part of the dataset's bytes, footers included; in brackets what all N read together, "
            "1.00 being each byte once. The counting filesystem hands out ranges as s3fs does, "
            "with what its client reads ahead.\n",
            f"| dataset | MB | MB read by the driver | {heads} |",
            f"|---|---|---|{'---|' * len(WORKERS)}",
            *rows,
            "\nThe driver reads every footer once and sends the workers the list of parts and "
            "their row groups: of "
            f"10,000 parts with a row group each {index_bytes(10_000, 1)}; with 64 row groups each "
            f"{index_bytes(10_000, 64)}.\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="page to write; what is written by hand below its mark stays"
    )
    out: Path | None = parser.parse_args().out
    text = page()
    if out is None:
        print(text)
        return
    by_hand = out.read_text().partition(START) if out.exists() else ("", "", "")
    out.write_text("\n".join(filter(None, (text, "".join(by_hand[1:])))))


if __name__ == "__main__":
    main()
