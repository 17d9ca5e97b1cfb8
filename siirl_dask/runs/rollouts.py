"""SQL over every sample that a run generated, as one table: DuckDB reads the Parquet parts in place.

Only whole steps count: those whose parts are committed, see tables.py. The step under way is not one of them, nor one
that a killed run began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, join, open_fs
from siirl_storage.committed import by_folder, newest_parts, whole_folders
from siirl_storage.files import at, list_files

from siirl_dask.errors import DataError

if TYPE_CHECKING:
    import duckdb

_OVERVIEW = (
    "SELECT step, count(*) AS samples, round(avg(reward), 4) AS reward, "
    "round(avg(len(response_ids)), 1) AS response_tokens FROM rollouts GROUP BY step ORDER BY step"
)
_STEP = re.compile(r"step=(\d{6,})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SavedSteps:
    """The saved steps of a run, each with the paths of its parts below the table."""

    whole: Mapping[int, Sequence[str]]
    incomplete: Mapping[int, Sequence[str]]
    """Steps under way or never finished; the parts that are there are of one start."""


def saved_steps(fs: AbstractFileSystem, root: str) -> SavedSteps:
    """Return the steps of the table at ``root``. DataError for a damaged record."""
    files = {path: size for path, size in list_files(fs, root).items() if _STEP.fullmatch(path.rpartition("/")[0])}
    try:
        complete = whole_folders(fs, root, files)
    except StorageError as error:
        raise DataError(str(error)) from error
    whole, incomplete = {}, {}
    for folder, names in by_folder(files).items():
        step = int(folder.removeprefix("step="))
        if folder in complete:
            whole[step] = complete[folder]
        elif parts := newest_parts(names) or sorted(name for name in names if name.endswith(".parquet")):
            incomplete[step] = [f"{folder}/{name}" for name in parts]
    return SavedSteps(dict(sorted(whole.items())), dict(sorted(incomplete.items())))


def query(url: str, sql: str, *, incomplete: bool = False) -> pa.Table:
    """Return the answer to ``sql`` over the table ``rollouts`` of the run at ``url``: a row per sample, with ``step``.

    With ``incomplete`` the rows of steps count that are not whole. DataError if there is no such table or the SQL is
    wrong.
    """
    with _answer(url, sql, incomplete) as (relation, _):
        return relation.to_arrow_table()


def render(url: str, sql: str | None = None, *, incomplete: bool = False) -> tuple[str, str]:
    """Return the answer as text, and a sentence about steps that are not whole, which may be empty.

    Without SQL the answer is the number of samples and the mean reward of each step.
    """
    with _answer(url, sql or _OVERVIEW, incomplete) as (relation, steps):
        return str(relation), _remark(steps, incomplete)


def _remark(steps: SavedSteps, incomplete: bool) -> str:
    if not steps.incomplete:
        return ""
    parts = ", ".join(f"{step} ({len(parts)} parts)" for step, parts in steps.incomplete.items())
    return f"steps that are not whole, and {'counted' if incomplete else 'left out (--incomplete)'}: {parts}"


@contextmanager
def _answer(url: str, sql: str, incomplete: bool) -> Iterator[tuple[duckdb.DuckDBPyRelation, SavedSteps]]:
    import duckdb  # here, so that reading a config does not load it

    try:
        fs, path = open_fs(join(url, "rollouts"))
    except StorageError as error:
        raise DataError(str(error)) from error
    steps = saved_steps(fs, path)
    parts = [*steps.whole.values(), *(steps.incomplete.values() if incomplete else ())]
    if not parts:
        remark = f"; {_remark(steps, incomplete)}" if steps.incomplete else ""
        raise DataError(f"{url!r} holds no rollouts: expected the folder of a run that has finished a step{remark}")
    local = isinstance(fs, LocalFileSystem)
    with duckdb.connect() as connection:
        if not local:
            connection.register_filesystem(fs)
        files = [at(path, part) for own in parts for part in own]
        names = [file if local else fs.unstrip_protocol(file) for file in files]
        quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
        connection.execute(
            "CREATE VIEW rollouts AS SELECT * "
            f"FROM read_parquet([{quoted}], hive_partitioning=true, hive_types={{'step': BIGINT}})"
        )
        try:
            relation = connection.sql(sql)
            if relation is None:
                raise DataError(f"the query gives no table: expected a SELECT, not {sql!r:.100}")
            yield relation, steps
        except duckdb.Error as error:
            raise DataError(f"the query failed: {error}") from error
