"""SQL over every sample that a run generated, as one table: DuckDB reads the Parquet parts in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from siirl_storage import StorageError, join, open_fs

from siirl_dask.errors import DataError

if TYPE_CHECKING:
    import duckdb

_OVERVIEW = (
    "SELECT step, count(*) AS samples, round(avg(reward), 4) AS reward, "
    "round(avg(len(response_ids)), 1) AS response_tokens FROM rollouts GROUP BY step ORDER BY step"
)


def query(url: str, sql: str) -> pa.Table:
    """Return the answer to ``sql`` over the table ``rollouts`` of the run at ``url``: a row per sample, with ``step``.

    DataError if there is no such table or the SQL is wrong.
    """
    with _answer(url, sql) as relation:
        return relation.to_arrow_table()


def render(url: str, sql: str | None = None) -> str:
    """Return the answer as text; without SQL the number of samples and the mean reward of each step."""
    with _answer(url, sql or _OVERVIEW) as relation:
        return str(relation)


@contextmanager
def _answer(url: str, sql: str) -> Iterator[duckdb.DuckDBPyRelation]:
    import duckdb  # here, so that reading a config does not load it

    try:
        fs, path = open_fs(join(url, "rollouts"))
    except StorageError as error:
        raise DataError(str(error)) from error
    if not fs.glob(f"{path}/step=*/*.parquet"):
        raise DataError(f"{url!r} holds no rollouts: expected the folder of a run that has finished a step")
    local = "file" in fs.protocol if isinstance(fs.protocol, tuple) else fs.protocol == "file"
    with duckdb.connect() as connection:
        if not local:
            connection.register_filesystem(fs)
        name = path if local else fs.unstrip_protocol(path)
        quoted = f"{name}/step=*/*.parquet".replace("'", "''")
        connection.execute(
            "CREATE VIEW rollouts AS SELECT * "
            f"FROM read_parquet('{quoted}', hive_partitioning=true, hive_types={{'step': BIGINT}})"
        )
        try:
            relation = connection.sql(sql)
            if relation is None:
                raise DataError(f"the query gives no table: expected a SELECT, not {sql!r:.100}")
            yield relation
        except duckdb.Error as error:
            raise DataError(f"the query failed: {error}") from error
