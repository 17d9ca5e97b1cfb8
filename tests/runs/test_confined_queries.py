"""A query of a run's samples reads the table that was opened, and does nothing else, whoever
wrote it.
"""

from pathlib import Path

import pytest

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.rollouts import open_newest, open_rollouts, query
from tests.runs.test_questions import row, save

STEPS = {1: [row(1, at, 0.5, 3) for at in range(4)], 2: [row(2, at, 1.0, 3) for at in range(4)]}


@pytest.fixture
def runs(store_url):
    """Two runs beside each other, of which one's name is a pattern of the other's."""
    mine, other = f"{store_url}/exp[1]", f"{store_url}/exp1"
    for url in (mine, other):
        save(url, STEPS)
    return mine, other


def test_what_is_asked_of_the_own_table_is_answered(runs):
    mine, _ = runs
    for sql, answer in (
        (
            "SELECT step, avg(reward) AS r FROM rollouts GROUP BY step ORDER BY step",
            [(1, 0.5), (2, 1.0)],
        ),
        ("WITH a AS (SELECT * FROM rollouts) SELECT count(*) AS n FROM a WHERE step = 2", [(4,)]),
        ("FROM rollouts SELECT count(*) AS n", [(8,)]),
        (
            "SELECT list_sum(list_transform(response_ids, lambda x: x)) AS n FROM rollouts LIMIT 1",
            [(21,)],
        ),
    ):
        assert [tuple(one.values()) for one in query(mine, sql).to_pylist()] == answer
    with open_newest(mine, [2]) as newest:
        assert newest.table("SELECT count(*) AS n FROM rollouts")["n"].to_pylist() == [4]
    with open_rollouts(mine) as rollouts:
        assert rollouts.table(f"SELECT count(*) AS n FROM {rollouts.of_steps([1])}")[
            "n"
        ].to_pylist() == [4]


STATEMENTS = (
    "COPY (SELECT 1) TO '{out}'",
    "COPY rollouts TO '{out}'",
    "SELECT 1; COPY (SELECT 1) TO '{out}'",
    "ATTACH '{out}'",
    "EXPORT DATABASE '{out}'",
    "CREATE TABLE mine AS SELECT 1",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA enable_profiling",
    "CALL pragma_version()",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'",
    "",
    ";",
)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_that_is_no_select_does_nothing(tmp_path, statement):
    url = save(tmp_path / "run", STEPS)
    out = tmp_path / "out.csv"
    with pytest.raises(DataError, match=r"expected one SELECT|the query failed"):
        query(url, statement.format(out=out))
    assert not out.exists()


def test_a_select_reaches_no_other_file_and_no_variable_of_python(runs, tmp_path):
    mine, other = runs
    secret = tmp_path / "secret.txt"
    secret.write_text("token")
    there = f"{other}/rollouts/step=000001/part-0003-00000.parquet"
    hidden = [1, 2, 3]
    for sql in (
        f"SELECT content FROM read_text('{secret}')",
        f"SELECT * FROM read_csv('{secret}')",
        f"SELECT * FROM '{secret}'",
        f"SELECT * FROM glob('{tmp_path}/*')",
        f"SELECT * FROM read_parquet('{there}')",
        "SELECT * FROM "
        f"read_parquet('{mine}/rollouts/../../exp1/rollouts/step=000001/part-0003-00000.parquet')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_text('http://127.0.0.1:9/x')",
        "SELECT * FROM hidden",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT getenv('HOME')",
    ):
        with pytest.raises(DataError, match="the query failed"):
            query(mine, sql)
    assert hidden == [1, 2, 3]
    assert Path(secret).read_text() == "token"
