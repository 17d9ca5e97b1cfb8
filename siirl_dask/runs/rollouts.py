"""Every sample a run has generated, as one table for SQL. DuckDB reads the Parquet parts where they lie."""

from __future__ import annotations

import duckdb
from siirl_storage import join, open_fs

from siirl_dask.errors import DataError

_OVERVIEW = (
    "SELECT step, count(*) AS samples, round(avg(reward), 4) AS reward, "
    "round(avg(len(response_ids)), 1) AS response_tokens FROM rollouts GROUP BY step ORDER BY step"
)


def query(url: str, sql: str | None = None) -> str:
    """The answer to ``sql`` over the table ``rollouts`` (one row a sample, with ``step``), as text. DataError if
    there is no such table or the SQL is wrong.
    """
    fs, path = open_fs(join(url, "rollouts"))
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
            return str(connection.sql(sql or _OVERVIEW))
        except duckdb.Error as error:
            raise DataError(f"the query failed: {error}") from error
