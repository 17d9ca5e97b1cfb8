"""Paths of ``data import --column``: what they choose is what Python chooses of the rows."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.datasets.column_paths import extract, steps_of, type_at
from siirl_dask.errors import DataError

MESSAGE = pa.struct({"role": pa.string(), "content": pa.string()})
KINDS = [pa.list_(MESSAGE), pa.large_list(MESSAGE)]
MESSAGES = st.lists(
    st.none()
    | st.builds(
        lambda role, content: {"role": role, "content": content}, st.text(), st.none() | st.text()
    ),
    max_size=4,
)
NUMBER = st.integers(-5, 5)


def column(rows, kind):
    """Return a column in two chunks, the second of which begins within its buffers."""
    whole = pa.array([[], *rows], kind)
    return pa.table(
        {
            "messages": pa.chunked_array(
                [whole.slice(1, len(rows) // 2), whole.slice(1 + len(rows) // 2)]
            )
        }
    )


def taken(rows, kind, path):
    table = column(rows, kind)
    found = extract(table, path)
    found.validate(full=True)
    assert found.type == type_at(table.schema, path, "it")
    return found.to_pylist()


@given(rows=st.lists(st.none() | MESSAGES, max_size=6), kind=st.sampled_from(KINDS), number=NUMBER)
def test_a_number_chooses_an_item_and_null_where_there_is_none(rows, kind, number):
    def item(row):
        return row[number] if row is not None and -len(row) <= number < len(row) else None

    chosen = [item(row) for row in rows]
    assert taken(rows, kind, f"messages[{number}]") == chosen
    contents = [None if one is None else one["content"] for one in chosen]
    assert taken(rows, kind, f"messages[{number}].content") == contents


@given(
    rows=st.lists(st.none() | MESSAGES, max_size=6),
    kind=st.sampled_from(KINDS),
    start=st.none() | NUMBER,
    stop=st.none() | NUMBER,
)
def test_a_slice_cuts_each_list_as_python_does(rows, kind, start, stop):
    path = f"messages[{'' if start is None else start}:{'' if stop is None else stop}]"
    cut = [None if row is None else row[start:stop] for row in rows]
    assert taken(rows, kind, path) == cut
    roles = [
        None if row is None else [None if one is None else one["role"] for one in row]
        for row in cut
    ]
    assert taken(rows, kind, f"{path}.role") == roles


def test_brackets_may_follow_each_other_and_stand_within_a_path():
    table = pa.table({"a": [{"b": [[1, 2], [3]]}, {"b": [[4]]}]})
    assert extract(table, "a.b[0][-1]").to_pylist() == [2, 4]
    assert extract(table, "a.b[1:][0]").to_pylist() == [[3], None]
    assert steps_of("a.b[1:][0]") == ["a", "b", slice(1, None), 0]


def test_a_name_with_brackets_is_itself():
    table = pa.table({"x[0]": [1], "x": [[2]]})
    assert extract(table, "x[0]").to_pylist() == [1]
    assert type_at(table.schema, "x[0]", "it") == pa.int64()


@pytest.mark.parametrize(
    "path", ["x[", "x]", "[0]", "x[a]", "x[0]y", "x[1:2:3]", "x..y", "x[0", "x[]", "x[9999999999]"]
)
def test_other_brackets_are_refused(path):
    with pytest.raises(DataError, match="expected a name, then"):
        type_at(pa.schema({"x": pa.list_(pa.int64())}), path, "it")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "text[0]",
            "'it' has no column 'text[0]': what is before the brackets holds string, no list",
        ),
        ("xs[0].y", "'it' has no column 'xs[0].y': no 'y' (there is: int64)"),
        ("ys[0]", "no 'ys' (there is: text, xs)"),
    ],
)
def test_a_path_that_is_not_there_says_what_is(path, said):
    schema = pa.schema({"text": pa.string(), "xs": pa.list_(pa.int64())})
    with pytest.raises(DataError) as error:
        type_at(schema, path, "it")
    assert said in str(error.value)
