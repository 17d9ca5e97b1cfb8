"""A JSON file that is one object with a whole table in it is refused: it was imported as one row."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.datasets import ImportRequest, import_data
from siirl_dask.errors import DataError

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)
chats = st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2)
cells = st.sampled_from([texts, st.integers(-9, 9), chats, st.lists(texts, max_size=2)])
names = st.lists(
    st.sampled_from(["prompt", "answer", "data", "rows", "messages", "0", "ä"]),
    min_size=1,
    max_size=3,
    unique=True,
)


@st.composite
def tables(draw):
    """Return a table's columns, lists of one length, and names of its rows."""
    length = draw(st.integers(1, 4))
    columns = {
        name: draw(st.lists(draw(cells), min_size=length, max_size=length)) for name in draw(names)
    }
    columns["text"] = draw(st.lists(texts, min_size=length, max_size=length))
    index = draw(st.sampled_from([None, [f"row {number}" for number in range(length)]]))
    return columns, index


def imported(folder, text, name="rows.json"):
    source = folder / name
    source.write_text(text, encoding="utf-8")
    target = folder / f"table-{len(list(folder.iterdir()))}"
    return import_data(ImportRequest(sources=[str(source)], to=str(target)))


@given(table=tables())
def test_pandas_rows_are_imported_and_its_other_orients_are_refused(table, tmp_path_factory):
    pandas = pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("orients")
    columns, index = table
    frame = pandas.DataFrame(columns, index=index)
    for lines in (True, False):
        read = imported(folder, frame.to_json(orient="records", lines=lines))
        assert read.num_rows == len(frame)
        assert read.schema.names == list(columns)
    for orient in ("columns", "index", "split", "table", "values"):
        with pytest.raises(DataError, match=r"orient='records'|it is no object"):
            imported(folder, frame.to_json(orient=orient))


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": {"0": "a", "1": "b"}, "answer": {"0": "1", "1": "2"}},
        {"prompt": {}, "answer": {}},
        {"q-7": {"prompt": "a", "answer": "1"}},
        {"prompt": ["a", "b"], "answer": ["1", "2"]},
        {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}, {"prompt": "c"}]},
        {"version": "1.1", "data": [{"prompt": "a"}]},
        {"features": [{"name": "prompt"}], "rows": [{"row_idx": 0}], "num_rows_total": 100},
        {"type": "text2text", "instances": [{"input": "a", "output": "1"}]},
    ],
)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_table_in_one_object_is_refused_with_what_to_write(content, name, tmp_path):
    text = json.dumps(content)
    with pytest.raises(DataError, match=r"would be read as one row: .*orient='records'"):
        imported(tmp_path, text, name)
    # what it says: in brackets it is one row
    if all(content.values()):
        assert imported(tmp_path, f"[{text}]", name).num_rows == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "answer": "1"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "a"}], "tools": []},
        {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}},
        {"prompt": "a", "tests": [{"input": "1", "output": "2"}]},
        {"question": {"text": "a"}, "answer": {"number": 1}},
    ],
)
def test_one_row_is_a_row(row, tmp_path):
    read = imported(tmp_path, json.dumps(row, indent=1))
    assert read.num_rows == 1
    assert read.schema.names == list(row)


def test_objects_that_follow_each_other_are_rows_whatever_they_hold(tmp_path):
    row = json.dumps({"prompt": {"a": 1}, "answer": {"a": 2}})
    assert imported(tmp_path, f"{row}\n{row}\n").num_rows == 2


def test_a_table_in_one_object_beyond_the_longest_row_is_named_as_one(tmp_path):
    column = json.dumps({"prompt": {str(number): "x" * 1000 for number in range(40_000)}})
    with pytest.raises(DataError, match="of a whole table in one object, write an object"):
        imported(tmp_path, column)
