"""A partition of a Dask collection becomes a part of a table with the same rows, or is refused."""

from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from siirl_storage import commit, open_table

from siirl_dask.coordinator.source import Source, source_schema
from siirl_dask.datasets import ImportRequest, import_data
from siirl_dask.datasets.partitions import (
    common_schema,
    is_written_as,
    partition_table,
    stage_again,
    stage_partition,
)
from siirl_dask.driver.checks.prompt_rows import check_rows
from siirl_dask.errors import DataError
from siirl_dask.tables.content import content_digest

CHAT = [{"role": "user", "content": "2+2?"}]
INDEXED = pa.table(
    {
        "prompt": ["a", "b"],
        "answer": pa.array(["1", "2"]).dictionary_encode(),
        "__null_dask_index__": [0, 1],
        "__index_level_0__": [5, 6],
    }
)
"""As pandas and Dask write a dataframe with a category."""


def test_categories_are_decoded_and_indices_left_out_wherever_a_dataframe_comes_in(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    assert partition_table(INDEXED).to_pylist() == rows
    files = tmp_path / "written by dask"
    files.mkdir()
    pq.write_table(INDEXED, files / "part.0.parquet")
    imported = import_data(ImportRequest(sources=[str(files)], to=str(tmp_path / "table")))
    assert imported.to_table().to_pylist() == rows
    source = Source(url=str(files), prompt="prompt", answer="answer")
    read = source_schema(open_table(str(files)).schema, source)
    assert not [name for name in read.names if name.startswith("__")]
    assert read.field("answer").type == pa.large_string()


def test_a_bags_rows_may_lack_keys_and_keep_chat_messages():
    rows = [{"prompt": CHAT, "answer": "4"}, {"prompt": CHAT, "answer": "4", "hint": "even"}]
    table = partition_table(iter(rows))
    assert table.to_pylist() == [{**rows[0], "hint": None}, rows[1]]


@pytest.mark.parametrize(
    "partition", [[1], ["a"], {"prompt": ["a"]}, "rows", 5, [{"prompt": "a", 1: "b"}]]
)
def test_what_is_no_table_is_said_and_not_written(partition, tmp_path):
    staged = stage_partition(partition, str(tmp_path / "t"), "prompt")
    assert staged.part is None
    assert "a partition is no table" in staged.problem


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters()),
    st.binary(max_size=2),
    st.sampled_from([object(), {1, 2}, {"a": 1}, {1: "a"}, [], [None], [[1]], np.ones((2, 2)), 1j]),
)


@given(values=st.lists(VALUES, min_size=1, max_size=4))
def test_whatever_a_bag_holds_is_a_table_or_is_named_by_its_column(values):
    staged = stage_partition([{"prompt": value} for value in values], "memory://bag", "prompt")
    if staged.part is None:
        assert "a partition is no table: column 'prompt': " in staged.problem or (
            "cannot store" in staged.problem
        )
    else:
        assert staged.part.rows == len(values)


def test_columns_of_one_name_are_refused_by_it(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    staged = stage_partition(table, str(tmp_path / "t"), "prompt")
    assert "2 of its columns are called 'prompt'" in staged.problem


@pytest.mark.parametrize("path", ["prompt", "extra.prompt"])
def test_chat_messages_that_became_text_are_refused_with_the_setting(path, tmp_path):
    text = str(CHAT)
    nested = {"prompt": [text], "extra": [{"prompt": text}], "answer": ["4"]}
    staged = stage_partition(pa.table(nested), str(tmp_path / "t"), path)
    assert staged.part is None
    assert 'dask.config.set({"dataframe.convert-string": False})' in staged.problem
    plain = stage_partition(pa.table({"prompt": [text, "2+2?"]}), str(tmp_path / "t"), "prompt")
    assert plain.part is not None, "one prompt that looks so is a prompt"


def test_a_run_refuses_them_in_files_that_dask_wrote(tmp_path):
    pq.write_table(
        pa.table({"prompt": [str(CHAT)] * 3, "answer": ["4"] * 3}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"lists of chat messages were made text.*convert-string"):
        check_rows(Source(url=str(tmp_path / "a.parquet"), prompt="prompt", answer="answer"))


def staged_schemas(tmp_path, *tables):
    return [stage_partition(table, str(tmp_path / "t"), "prompt") for table in tables]


def test_a_column_without_values_in_one_partition_has_the_type_of_the_others(tmp_path):
    nulls = pa.table({"prompt": ["a"], "hint": pa.nulls(1)})
    texts = pa.table({"hint": ["x"], "prompt": ["b"]})
    empty = texts.schema.empty_table()
    staged = staged_schemas(tmp_path, nulls, empty, texts)
    assert [one.part is None for one in staged] == [False, True, False]
    schema = common_schema(staged)
    parts = [one.part for one in staged if one.part]
    table = commit(str(tmp_path / "t"), parts, schema=schema, new=True)
    assert table.to_table().to_pylist() == [
        {"prompt": "a", "hint": None},
        {"prompt": "b", "hint": "x"},
    ]


LEAVES = {"name": st.text(max_size=3), "tokens": st.integers(-9, 9)}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.just("user")},
        optional={
            **{name: st.none() | leaf for name, leaf in LEAVES.items()},
            "parts": st.lists(
                st.fixed_dictionaries({"kind": st.none()}, optional=LEAVES), max_size=2
            ),
        },
    ),
    max_size=2,
)
KEYS = {"level": st.integers(0, 9), "tags": st.lists(st.text("ab", max_size=2), max_size=2)}
NESTED = st.fixed_dictionaries(
    {
        "prompt": MESSAGES,
        "extra": st.none() | st.fixed_dictionaries({"source": st.just("web")}, optional=KEYS),
    }
)


@given(rows=st.lists(NESTED, min_size=1, max_size=6), cut=st.integers(0, 6))
def test_where_a_bag_is_cut_makes_no_difference_to_its_rows(rows, cut):
    """Keys of chat messages and of structs may be in some partitions only."""
    url = f"memory://cut-{uuid4().hex}"
    staged = [stage_partition(part, url, "prompt") for part in (rows[:cut], rows[cut:])]
    schema = common_schema(staged)
    fitting = []
    for one in staged:
        fitting.append(one if is_written_as(one, schema) else stage_again(one, url, schema))
    assert all(is_written_as(one, schema) for one in fitting)
    parts = [one.part for one in fitting if one.part]
    table = commit(url, parts, schema=schema, new=True).to_table()
    assert table.to_pylist() == partition_table(rows).to_pylist()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"prompt": ["b"]}, "'level' is in some partitions only"),
        (
            {"prompt": ["b"], "level": ["high"]},
            "'level' is int64 in the partitions before, and str",
        ),
        (
            {"prompt": ["b"], "level": [0.5]},
            "'level' is int64 in the partitions before, and double in partition 1",
        ),
        (
            {"prompt": [b"b"], "level": [1]},
            "'prompt' is string in the partitions before, and binary in partition 1",
        ),
    ],
)
def test_partitions_whose_columns_differ_are_refused_by_name(other, said, tmp_path):
    first = pa.table({"prompt": ["a"], "level": [1]})
    with pytest.raises(DataError, match=said):
        common_schema(staged_schemas(tmp_path, first, pa.table(other)))


def test_the_digest_is_of_the_rows_and_their_order_and_of_nothing_else(tmp_path):
    one, two = pa.table({"prompt": ["a", "b"]}), pa.table({"prompt": ["c"]})
    chunked = pa.concat_tables([one.slice(0, 1), one.slice(1)])

    def digest(*tables):
        staged = staged_schemas(tmp_path, *tables)
        return content_digest(common_schema(staged), [staged_one.part for staged_one in staged])

    assert digest(one, two) == digest(chunked, two)
    assert len({digest(one, two), digest(two, one), digest(one), digest(one, one)}) == 4
