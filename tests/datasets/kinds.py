"""One table, written as each kind of file that can be imported."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {
        "prompt": f"{number} + 1?",
        "answer": str(number + 1),
        "weight": number / 2,
        "seen": number % 2 == 0,
    }
    for number in range(12)
]
TABLE = pa.Table.from_pylist(ROWS)


def parquet(folder: Path) -> str:
    pq.write_table(TABLE, folder / "rows.parquet", row_group_size=5)
    return str(folder / "rows.parquet")


def arrow(folder: Path) -> str:
    with pa.ipc.new_file(folder / "rows.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=5)
    return str(folder / "rows.arrow")


def stream(folder: Path, name: str = "stream.arrow", table: pa.Table = TABLE) -> str:
    with pa.ipc.new_stream(folder / name, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return str(folder / name)


def json_lines(folder: Path) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return str(folder / "rows.jsonl")


def compressed(folder: Path) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return str(folder / "rows.jsonl.gz")


def json_array(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=1))
    return str(folder / "rows.json")


def comma_separated(folder: Path) -> str:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    return str(folder / "rows.csv")


def saved(folder: Path) -> str:
    """Write what ``datasets.Dataset.save_to_disk`` does, in two files whose order is not that of
    their names.
    """
    place = folder / "saved"
    place.mkdir()
    stream(place, "b.arrow", TABLE.slice(0, 7))
    stream(place, "a.arrow", TABLE.slice(7))
    (place / "dataset_info.json").write_text(json.dumps({"features": {}}))
    (place / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]})
    )
    return str(place)


def files_of_a_glob(folder: Path) -> str:
    for number in range(3):
        pq.write_table(TABLE.slice(4 * number, 4), folder / f"part-{number}.parquet")
    return str(folder / "part-*.parquet")


def folder_of_files(folder: Path) -> str:
    (folder / "many").mkdir()
    files_of_a_glob(folder / "many")
    return str(folder / "many")


KINDS = [
    *(parquet, arrow, stream, json_lines, compressed, json_array, comma_separated),
    *(saved, files_of_a_glob, folder_of_files),
]
