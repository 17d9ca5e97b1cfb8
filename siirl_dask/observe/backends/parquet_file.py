"""Writes ``<run.url>/metrics.parquet``: a row for each value of each record, for readers of columns.

    SELECT step, value FROM 'runs/mine/metrics.parquet' WHERE phase = 'train' AND name = 'reward/mean' ORDER BY step

The file is written again as a whole, now and then and at the end: Parquet cannot be appended to.
"""

from __future__ import annotations

import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
from siirl_storage import join, open_fs, write_atomic

from siirl_dask.errors import DataError
from siirl_dask.observe.backends.protocol import TrackedRun
from siirl_dask.observe.metrics import Record, read_metrics
from siirl_dask.observe.summary import Status

FILE = "metrics.parquet"
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "phase": pa.string(),
        "seconds": pa.float64(),
        "name": pa.string(),
        "value": pa.float64(),
    }
)
_PAUSE = 10.0  # seconds between two times that it is written
_SHARE = 50  # times that one takes, at least, until the next


class ParquetBackend:
    """Keeps all records of the run, those before a resumption included, and writes them as one
    table.
    """

    def __init__(self) -> None:
        # by phase and step: a record may come twice
        self._tables: dict[tuple[str, int], pa.Table] = {}
        self._due = 0.0

    def begin(self, run: TrackedRun) -> None:
        """Take what earlier starts of the run have recorded."""
        self._fs, self._path = open_fs(join(run.url, FILE))
        with suppress(DataError):  # a new run has no metrics.jsonl, and nobody reads a damaged one
            self._tables = {
                (record["phase"], record["step"]): _table(record)
                for record in read_metrics(run.url)
            }

    def rewind(self, step: int) -> None:
        """Forget the records of the steps from ``step`` on."""
        self._tables = {key: table for key, table in self._tables.items() if key[1] < step}

    def write(self, record: Record) -> None:
        """Add a record; the file has it some seconds later."""
        self._tables[record["phase"], record["step"]] = _table(record)
        now = time.monotonic()
        if now >= self._due:
            self._write()
            self._due = time.monotonic() + max(_PAUSE, _SHARE * (time.monotonic() - now))

    def end(self, status: Status) -> None:
        """Write the file, with how the run ended in its metadata."""
        self._write({"status": str(status)})

    def _write(self, metadata: dict[str, str] | None = None) -> None:
        table = pa.concat_tables([SCHEMA.empty_table(), *self._tables.values()]).combine_chunks()
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
        write_atomic(self._fs, self._path, sink.getvalue().to_pybytes())


def _table(record: Record) -> pa.Table:
    names = list(record["metrics"])
    values = list(record["metrics"].values())
    same = [
        [value] * len(names) for value in (record["step"], str(record["phase"]), record["seconds"])
    ]
    return pa.table([*same, names, values], schema=SCHEMA)
