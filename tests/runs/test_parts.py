"""Parts of a run whose columns differ, as those of a start that resumes it with another DAG do, are
one table: no column is lost, and none is taken for another.
"""

from itertools import permutations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from siirl_storage import commit_parts, stage_part

from siirl_dask.errors import ConfigError, DataError
from siirl_dask.runs.reader import Run
from siirl_dask.runs.samples.parts import common_schema, sample_parts
from siirl_dask.runs.samples.rollouts import open_rollouts

LISTS = pa.list_(pa.struct([("name", pa.string())]))
LATER = pa.list_(pa.struct([("name", pa.large_string()), ("score", pa.float64())]))
TABLES = {
    "of the first DAG": pa.table(
        {
            "row_id": pa.array([0, 1], pa.int64()),
            "reward": pa.array([0.5, 1.0], pa.float32()),
            "source": pa.array(["a", "b"]).dictionary_encode(),
            "said": pa.array(["x", None]),
            "judged": pa.array([[{"name": "j"}], []], LISTS),
            "old": pa.array([1, 2], pa.int32()),
        }
    ),
    "of another": pa.table(
        {
            "row_id": pa.array([2], pa.int64()),
            "reward": pa.array([0.25], pa.float64()),
            "source": pa.array(["c"], pa.large_string()),
            "said": pa.array(["y"]).dictionary_encode(),
            "judged": pa.array([[{"name": "k", "score": 0.5}]], LATER),
            "new": pa.array([[1, 2]], pa.large_list(pa.int32())),
        }
    ),
    "of a third without values": pa.table(
        {"row_id": pa.array([3], pa.int64()), "said": pa.nulls(1), "new": pa.nulls(1)}
    ),
}
ROWS = {
    number: row
    for table in TABLES.values()
    for row in table.to_pylist()
    for number in [row["row_id"]]
}
NAMES = {"row_id", "reward", "source", "said", "judged", "old", "new", "step"}


def save(url, tables, attempts):
    """Save each table as a step, by the start with its number."""
    for step, (table, attempt) in enumerate(zip(tables, attempts, strict=True), 1):
        folder = f"{url}/rollouts/step={step:06d}"
        commit_parts(folder, attempt, [stage_part(folder, attempt, 0, table)])


def expected(number, names):
    row = dict.fromkeys(names) | ROWS[number]
    if "score" in str(row["judged"]) or row["judged"] is None:
        return row
    return row | {"judged": [{**one, "score": None} for one in row["judged"]]}


@pytest.mark.parametrize("order", [*permutations(TABLES)], ids=lambda order: ", ".join(order))
def test_parts_with_other_columns_are_one_table_in_any_order(order, store_url):
    url = f"{store_url}/run"
    save(url, [TABLES[name] for name in order], [1, 2, 3])
    parts = sample_parts(url)
    schema = common_schema(parts)
    assert set(schema.names) == NAMES
    assert "dictionary" not in str(schema)
    table = pa.concat_tables([part.read(schema) for part in parts])
    names = NAMES - {"step"}
    for row in table.to_pylist():
        del row["step"]
        assert row == expected(row["row_id"], names)
    asked = Run(url).rollouts("SELECT * FROM rollouts")
    assert {*asked.column_names} == NAMES | {"attempt"}
    for row in asked.select(sorted(names)).to_pylist():
        assert row == expected(row["row_id"], names)
    with open_rollouts(url) as rollouts:
        of_each = [
            rollouts.table(f"SELECT new, old FROM {rollouts.of_steps([step])}").num_rows
            for step in (1, 2, 3)
        ]
    assert of_each == [TABLES[name].num_rows for name in order]


def test_a_dataframe_has_the_columns_of_all_parts(tmp_path):
    from siirl_dask.driver.feed import RunFeed
    from siirl_dask.driver.handle import RunHandle

    save(tmp_path, TABLES.values(), [1, 2, 3])
    frame = RunHandle(str(tmp_path), RunFeed(), lambda at_once: None).rollouts()
    assert {*frame.columns} == NAMES
    found = frame.compute(scheduler="synchronous")
    assert frame.dtypes.equals(found.dtypes), "what Dask expects is what comes"
    table = pa.Table.from_pandas(found, preserve_index=False).drop_columns("step")
    for row in table.to_pylist():
        assert row == expected(row["row_id"], NAMES - {"step"})


def test_a_column_that_no_type_holds_is_named_with_its_steps(tmp_path):
    texts = pa.table({"row_id": [0], "answer": ["4"]})
    numbers = pa.table({"row_id": [1], "answer": [4]})
    save(tmp_path, [texts, texts, numbers], [1, 1, 2])
    with pytest.raises(DataError, match=r"'answer' is string in step 1 and int64 in step 3; ask"):
        common_schema(sample_parts(str(tmp_path)))
    assert common_schema(sample_parts(str(tmp_path), steps=[1, 2])).field("answer").type == "string"


STEPS = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=2),
    st.floats(),
    st.lists(st.one_of(st.integers(-1, 4), st.sampled_from(["1", None, 1.0, np.int64(2)]))),
    st.builds(range, st.integers(0, 4), st.integers(0, 4)),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("run"))
    save(url, TABLES.values(), [1, 1, 1])
    return url


@given(steps=STEPS)
def test_whatever_stands_as_steps_are_those_steps_or_an_error_that_names_them(saved, steps):
    is_list = isinstance(steps, list | range)
    if steps is None:
        assert [part.step for part in sample_parts(saved)] == [1, 2, 3]
    elif not is_list or any(type(step) not in (int, np.int64) for step in steps):
        with pytest.raises(ConfigError, match=r"steps=.*: expected a list of steps"):
            sample_parts(saved, steps=steps)
    elif {*steps} & {1, 2, 3}:
        found = [part.step for part in sample_parts(saved, steps=steps)]
        assert found == sorted({*steps} & {1, 2, 3})
    else:
        with pytest.raises(DataError, match=r"it has 3 steps, from 1 to 3"):
            sample_parts(saved, steps=steps)


def test_a_table_is_no_path(saved):
    with pytest.raises(DataError, match=r"'\.\./rollouts' is no table of a run"):
        sample_parts(f"{saved}/rollouts", table="../rollouts")


def test_a_link_to_a_run_that_was_moved_is_said_to_be_one(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved)
    assert len(sample_parts(str(link))) == 3
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"it is a link to '.*gone', which is not there"):
        sample_parts(str(link))
