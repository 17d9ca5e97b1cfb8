"""An unusable column of expected lengths is refused before anything starts, by ``plan`` and by
``run``.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.commands.plan import describe_run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.driver.run import run
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.planner import Phase, Rows
from tests.conftest import digits_overrides


@pytest.fixture
def given(digits_task, tmp_path):
    """Config and DAGs of a run whose dataset has a column of these lengths, of which the last is
    row 2 of a group.
    """

    def given(lengths, *overrides):
        rows = pa.table({"prompt": ["a", "b", "c"], "answer": ["", "", ""], "expected": lengths})
        path = tmp_path / "train.parquet"
        pq.write_table(
            pa.concat_tables(
                [rows.set_column(2, "expected", pa.array([1, 1, 1], rows[2].type)), rows]
            ),
            path,
        )
        task = [*digits_overrides(digits_task, tmp_path / "run"), f"data.url={path}", *overrides]
        file = load_config_file(shipped("quickstart.yaml"), task)
        return file.config, *dags(file)

    return given


@pytest.mark.parametrize(
    ("column", "lengths", "said"),
    [
        (
            "expectd",
            pa.array([1, 2, 3]),
            r"'expectd': .* is not there \(there is: .*did you mean 'expected'",
        ),
        (
            "expected",
            pa.array([1.0, 2.5, 3.0]),
            "'expected': .* holds double: expected whole numbers",
        ),
        (
            "expected",
            pa.array([1, 2, None]),
            "'expected': .* is None in row 5: expected at least 1",
        ),
        ("expected", pa.array([1, 0, 3]), "'expected': .* is 0 in row 4: expected at least 1"),
    ],
)
def test_an_unusable_column_is_named_with_its_dataset(given, column, lengths, said):
    config, dag, validation = given(lengths, f"rollout.expected_length_column={column}")
    for start in (describe_run, run):
        with pytest.raises(DataError, match=rf"rollout\.expected_length_column={said}") as caught:
            start(config, dag, validation)
        assert config.data.url in str(caught.value)


def test_lengths_may_be_in_a_struct_or_in_a_column_whose_name_has_a_dot(given):
    for flat in (False, True):
        rows = pa.table({"prompt": ["a", "b"], "answer": ["", ""], "extra": [{"n": 1}, {"n": 2}]})
        config, dag, validation = given(
            pa.array([1, 2, 3]), "rollout.expected_length_column=extra.n"
        )
        pq.write_table(rows.flatten() if flat else rows, config.data.url)
        plan = plan_phases(config, dag, validation, worker_names(config))[Phase.TRAIN][0]
        assert "extra.n" in plan.flow["prompts"].reads
        describe_run(config, dag, validation)


def test_a_dag_in_which_nobody_reads_it_is_refused(given):
    config, dag, validation = given(
        pa.array([1, 2, 3]),
        "rollout.expected_length_column=expected",
        "nodes.prompts.with.rollout=null",
    )
    with pytest.raises(
        ConfigError,
        match=r"rollout\.expected_length_column='expected' and no node reads that column",
    ):
        describe_run(config, dag, validation)


def test_prompts_stay_where_they_are_loaded_by_default(given):
    lengths = pa.array([1, 2, 3])
    for overrides, rows in {
        (): Rows.ANYWHERE,
        ("rollout.prompt_placement=balanced",): Rows.BALANCED,
        ("rollout.expected_length_column=expected",): Rows.BALANCED,
        (
            "rollout.expected_length_column=expected",
            "rollout.prompt_placement=anywhere",
        ): Rows.ANYWHERE,
    }.items():
        _, dag, _ = given(lengths, *overrides)
        assert dag.node("rollout").rows is rows, overrides
