"""JSON and CSV come back from an import as they are written, or are refused by name."""

import csv
import io
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from siirl_storage import open_fs

from siirl_dask.datasets import ColumnMapping, ImportRequest, import_data, json_rows
from siirl_dask.datasets.text_files import JsonFiles, TypesChanged, open_csv
from siirl_dask.datasets.whole_tables import table_in_one_object
from siirl_dask.errors import DataError


class Number(str):
    """A number as it is written."""


def written(value):
    """Return a value as JSON, with numbers as they are."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(name)}: {written(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + " ,".join(map(written, value)) + "]"
    return json.dumps(value)


def is_same(got, value):
    """Tell whether ``got`` is what ``value`` was written as: itself, or the text of a number, or
    JSON.
    """
    if value is None or got is None:
        return value is got
    if isinstance(value, Number):
        return str(value) == (got if isinstance(got, str) else json.dumps(got))
    if isinstance(value, str):
        return got == value
    if isinstance(value, bool):
        return got is value or got == json.dumps(value)
    if isinstance(got, str):
        return json.loads(got, parse_int=Number, parse_float=Number) == value
    if isinstance(value, dict):
        missing = [name for name in got if name not in value and got[name] is not None]
        return not missing and all(
            name in got and is_same(got[name], item) for name, item in value.items()
        )
    return len(got) == len(value) and all(map(is_same, got, value))


def read_json(folder, text, name="rows.jsonl"):
    (folder / name).write_bytes(text.encode())
    files = JsonFiles(open_fs(str(folder))[0], [str(folder / name)])
    try:
        table = pa.Table.from_batches(files.batches(), files.schema)
    except TypesChanged:
        table = pa.Table.from_batches(files.batches(), files.schema)
    return table, files.remarks


def read_csv(file, mark):
    schema, batches = open_csv(open_fs(str(file))[0], str(file), mark)
    return pa.Table.from_batches(batches(), schema)


digits = st.text("0123456789", min_size=1, max_size=25)
numbers = st.one_of(
    st.integers(-(2**80), 2**80).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(json.dumps),
    st.builds("{}.{}".format, st.integers(-5, 5), digits),
    st.builds(
        "{}{}{}".format, st.integers(-9, 9), st.sampled_from(["e", "E+", "e-"]), st.integers(0, 500)
    ),
    st.just("-0"),
).map(Number)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
keys = st.one_of(st.sampled_from(["answer", "Answer", "ANSWER", "a.b", ""]), texts)
values = st.recursive(
    scalars,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(keys, of, max_size=3),
    max_leaves=8,
)
whole = st.integers(-9, 9).map(str).map(Number)
similar = st.sampled_from(
    [numbers, whole, texts, st.lists(numbers, max_size=3), st.lists(texts, max_size=3)]
)
rows = st.one_of(
    st.lists(st.dictionaries(keys, values, max_size=4), min_size=1, max_size=6),
    similar.flatmap(
        lambda of: st.lists(st.dictionaries(keys, of, max_size=3), min_size=1, max_size=6)
    ),
)
layouts = st.sampled_from(
    ["\n".join, "\r\n \n".join, "".join, lambda rows: "[" + " ,\n".join(rows) + "\n]"]
)


@given(
    rows=rows,
    layout=layouts,
    chunk=st.sampled_from([1, 7, 2**20]),
    most=st.sampled_from([1, 3, 2**13]),
)
def test_any_json_table_comes_back_as_it_is_written(rows, layout, chunk, most, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    text = layout([written(row) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK", chunk)
        patch.setattr(json_rows, "_ROWS", most)
        if not any(rows):
            with pytest.raises(DataError, match="no columns"):
                read_json(folder, text)
            return
        if len(rows) == 1 and not text.startswith("[") and table_in_one_object(rows[0]):
            with pytest.raises(DataError, match="a whole table"):
                read_json(folder, text)
            return
        table, _ = read_json(folder, text)
    assert table.num_rows == len(rows)
    assert all(map(is_same, table.to_pylist(), rows))


exact = st.fixed_dictionaries(
    {
        "a": texts,
        "b": st.lists(st.integers(-9, 9)),
        "c": st.fixed_dictionaries({"d": st.booleans() | st.none()}),
    }
)
pieces = ["null", "NaN", "1.5", "\\ud800", "\x00", '"a": ""', "9" * 20]
marks = st.text('{}[],:" \n\\-0', max_size=3) | st.sampled_from(pieces)


@given(rows=st.lists(exact, min_size=2, max_size=5), data=st.data())
def test_lines_that_pyarrow_reads_give_the_table_or_the_refusal_that_others_give(
    rows, data, tmp_path_factory
):
    folder = tmp_path_factory.getbasetemp()
    first, *rest = map(json.dumps, [{"a": "x", "b": [1], "c": {"d": True}}, *rows])
    text = "\n".join(rest)
    at = data.draw(st.integers(0, len(text)))
    text = f"{first}\n{text[:at]}{data.draw(marks)}{text[at + data.draw(st.integers(0, 2)) :]}\n"
    found = []
    for by_pyarrow in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_rows, "_CHUNK", len(first) + 5)
            if not by_pyarrow:
                patch.setattr(json_rows, "_may_be_exact", lambda lines: False)
            try:
                found.append(read_json(folder, text))
            except DataError as error:
                found.append(str(error))
    assert found[0] == found[1]


names = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)
cells = st.one_of(
    st.none(),
    texts,
    st.text(',;"\t\r\n x', max_size=4),
    numbers.map(str),
    st.sampled_from(["yes", "NULL"]),
)


@given(
    data=st.data(),
    names=names,
    mark=st.sampled_from([",", ";", "\t"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_csv_table_comes_back_as_it_is_written(data, names, mark, end, tmp_path_factory):
    rows = data.draw(
        st.lists(st.lists(cells, min_size=len(names), max_size=len(names)), max_size=5)
    )
    out = io.StringIO()
    quoted = csv.writer(out, delimiter=mark, lineterminator=end, quoting=csv.QUOTE_ALL)
    quoted.writerow(names)
    for row in rows:
        line = io.StringIO()
        csv.writer(line, delimiter=mark, lineterminator="", quoting=csv.QUOTE_ALL).writerow(
            ["\x00null\x00" if cell is None else cell for cell in row]
        )
        out.write(line.getvalue().replace('"\x00null\x00"', "") + end)
    file = tmp_path_factory.getbasetemp() / "rows.csv"
    file.write_bytes(out.getvalue().encode())
    table = read_csv(file, mark)
    assert table.schema.names == names
    assert [
        list(row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)
    ] == rows


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (["7", "-9223372036854775808", "null"], pa.int64()),
        (["0.5", "1e-07", "5.0", "-0.0", "NaN", "Infinity"], pa.float64()),
        (["true", "null", "false"], pa.bool_()),
        (["7", "0.5"], pa.string()),
        (["3.10"], pa.string()),
        (["1e400"], pa.string()),
        (["-0"], pa.string()),
        (["0.00001"], pa.string()),
        (["1e5"], pa.string()),
        (["3.14159265358979323846"], pa.string()),
        (["9223372036854775808"], pa.string()),
        (["9007199254740993", "0.5"], pa.string()),
        (["123456789012345678901234567890", "5"], pa.string()),
    ],
)
def test_a_column_is_of_numbers_only_where_each_is_printed_as_it_is_written(
    answers, kind, tmp_path
):
    for place in ('{"a": %s}', '{"a": {"b": %s}}', '{"a": [%s]}'):
        lines = [place % answer for answer in answers]
        # an object alone in its file may be a whole table
        text = "\n".join(lines) if len(lines) > 1 else f"[{lines[0]}]"
        table, remarks = read_json(tmp_path, text)
        inner = table.schema.field("a").type
        if place != '{"a": %s}':
            inner = inner.field(0).type
        assert inner == kind
        assert bool(remarks) is pa.types.is_string(kind)


def test_a_late_value_decides_the_type_of_all_and_all_rows_come(tmp_path):
    lines = [f'{{"n": {number}, "text": "{number}"}}' for number in range(20_000)]
    table, remarks = read_json(tmp_path, "\n".join(["{}", *lines, '{"n": 0.5, "late": [1]}']))
    assert table["n"].to_pylist() == [None, *(str(number) for number in range(20_000)), "0.5"]
    assert table["late"].to_pylist()[-1] == [1]
    assert remarks == ["n holds whole numbers and numbers with a fraction: text, as it is written"]


def test_rows_that_are_read_twice_are_those_that_are_read_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(f'{{"n": {number}}}' for number in range(30_000))
    )
    once = JsonFiles(open_fs(str(tmp_path))[0], [str(tmp_path / "rows.jsonl")])
    twice = JsonFiles(open_fs(str(tmp_path))[0], [str(tmp_path / "rows.jsonl")])
    twice.settle()
    table = pa.Table.from_batches(once.batches(), once.schema)
    assert table.equals(pa.Table.from_batches(twice.batches(), twice.schema))
    assert table["n"].to_pylist() == list(range(30_000))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"x": 1}\n{"x": 1, "x": 2}',
            r"rows.jsonl cannot be read: row 2, line 2, column 1: .*the key 'x' twice",
        ),
        ('{"x": {"y": 1, "y": 2}}', "row 1, .*the key 'y' twice"),
        ('{"x": 1}\n{"x": }', "row 2, line 2, column 7: Expecting value"),
        ('[{"x": 1},\n 2]', "row 2, line 2, column 2: it is no object"),
        ('{"x": 1},{"x": 2}\n{"x": 3\n"y": 4}', "row 2, line 1, column 9: Expecting value"),
        ('[{"x": 1}] {"x": 2}', "there is more after the array"),
        ('[{"x": 1},]', "row 2, line 1, column 11: Expecting value"),
        ('[{"x": 1} {"x": 2}]', "line 1, column 11: expected a comma or the end of the array"),
        ('[{"x": 1}', "expected a comma or the end of the array"),
        ('{"x": "ok"}\n{"x": "\\ud800"}', "row 2: 'utf-8' codec can't encode"),
        ('{"x": ' + "9" * 5000 + "}", "row 1, .*4300 digits"),
        ('[{"x": ' + "[" * 70 + "]" * 70 + "}]", "row 1: its values are nested more than 60 deep"),
        ('{"x": ' + "[" * 99_999 + "]" * 99_999 + "}", "row 1, .*nested too deep"),
        (
            # long rows: the first block of 4 MB has fewer keys than may be, and few rows for each
            "".join(
                json.dumps({"x": {f"{a}": {f"{a}-{b}": 1 for b in range(150)}}, "y": "." * 70_000})
                + "\n"
                for a in range(99)
            ),
            "different keys",
        ),
    ],
)
def test_what_no_table_can_hold_is_refused_by_row(text, said, tmp_path):
    with pytest.raises(DataError, match=said):
        read_json(tmp_path, text)


def test_keys_that_are_data_become_text(tmp_path):
    rows = [{"x": {f"k{row}": row}} for row in range(1500)]
    table, remarks = read_json(tmp_path, "\n".join(map(json.dumps, rows)))
    assert [json.loads(text) for text in table["x"].to_pylist()] == [row["x"] for row in rows]
    assert remarks == ["x holds objects of 1000 different keys or more: text, as it is written"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a;b\n1;2\n", "no comma, and ';': say what is between columns, with --separator ';'"),
        (b'a,b\n1,2\n"x"y,2\n', "rows.csv cannot be read: line 3: "),
        (b'a,b\n1,"2\n', "rows.csv cannot be read: line 2: "),
        (b'a,b\n"\n\n",2\n1,2,3\n', "line 5: the row that ends here has 3 fields, and the first 2"),
        (b"a,b\n1\n", "line 2: the row that ends here has 1 field, and the first 2"),
        (b"a,b\n1,\xff\n", "'utf-8' codec can't decode"),
        (b'a,b\nx"y,2\n', "line 2: a quote within a field"),
        (b"", "names no columns"),
    ],
)
def test_csv_that_can_be_read_in_two_ways_is_refused_by_line(text, said, tmp_path):
    (tmp_path / "rows.csv").write_bytes(text)
    with pytest.raises(DataError, match=said):
        read_csv(tmp_path / "rows.csv", None)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.int64(), "007", 7),
        (pa.int64(), "+5", 5),
        (pa.int64(), "0x10", None),
        (pa.int64(), "5.0", None),
        (pa.int64(), "9223372036854775808", None),
        (pa.int8(), "200", None),
        (pa.float64(), "3.10", 3.1),
        (pa.float64(), "-inf", float("-inf")),
        (pa.float64(), "0e5", 0.0),
        (pa.float64(), "1e400", None),
        (pa.float64(), "1e-400", None),
        (pa.float64(), "9007199254740993", None),
        (pa.float32(), "1e300", None),
        (pa.bool_(), "True", True),
        (pa.bool_(), "yes", None),
        (pa.int64(), "", None),
    ],
)
def test_a_text_becomes_the_number_that_it_is_or_is_refused_with_its_row(
    kind, text, value, tmp_path
):
    (tmp_path / "a.csv").write_text('x\n1\n1\n"' + text + '"\n1\n')
    mapping = ColumnMapping(columns={"y": "x"}, types={"y": kind})
    request = ImportRequest(
        sources=[str(tmp_path / "a.csv")], to=str(tmp_path / "table"), mapping=mapping
    )
    if value is None:
        with pytest.raises(
            DataError, match="column 'y' holds string, and its value in row 3 is no"
        ):
            import_data(request)
        return
    made = import_data(request).to_table().to_pylist()
    assert made[2] == {"x": text, "y": value}


@given(number=st.floats(width=64))
def test_a_float_that_becomes_text_is_what_json_has(number):
    from siirl_dask.datasets.casting import cast

    assert cast(pa.chunked_array([[number]]), pa.string()).to_pylist() == [json.dumps(number)]


PART = st.fixed_dictionaries(
    {"type": st.just("text"), "text": st.text("ab [{", max_size=4)},
    optional={"image": st.none() | st.just("x.png")},
)
CONTENT = st.none() | st.text('ab [{"', max_size=5) | st.lists(PART, max_size=3)


@given(contents=st.lists(CONTENT, min_size=1, max_size=6), late=st.booleans())
def test_texts_beside_parts_of_messages_are_parts_and_no_json(contents, late, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    before = ["a"] * 9000 if late else []
    rows = [{"prompt": [{"role": "user", "content": one}]} for one in [*before, *contents]]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    remarks = []
    request = ImportRequest(
        sources=[str(folder / "a.jsonl")], to=str(folder / "t"), remark=remarks.append
    )
    table = import_data(request).to_table()
    found = [chat[0]["content"] for chat in table["prompt"].to_pylist()][len(before) :]
    has_parts = any(isinstance(one, list) and one for one in contents)
    texts = [one for one in [*before, *contents] if isinstance(one, str)]
    if not has_parts:
        return
    for one, read in zip(contents, found, strict=True):
        if one is None:
            assert read is None
            continue
        expected = [{"type": "text", "text": one}] if isinstance(one, str) else one
        assert [{k: v for k, v in part.items() if v is not None} for part in read] == [
            {k: v for k, v in part.items() if v is not None} for part in expected
        ]
    assert bool(remarks) is bool(texts)
    assert all("a text is a list of one part" in text for text in remarks)


def test_texts_beside_lists_that_are_no_parts_stay_text(tmp_path):
    for number, row in enumerate(
        [
            '{"content": "a"}\n{"content": [{"x": 1}]}\n',
            '{"x": "a"}\n{"x": [{"type": "t", "text": "b"}]}\n',
        ]
    ):
        (tmp_path / f"{number}.jsonl").write_text(row)
        request = ImportRequest(
            sources=[str(tmp_path / f"{number}.jsonl")], to=str(tmp_path / f"t{number}")
        )
        assert pa.types.is_string(import_data(request).schema[0].type)


@pytest.mark.parametrize("ending", ["jsonl.gz", "csv.gz", "jsonl.zst", "csv.zst"])
@pytest.mark.parametrize("damage", ["plain", "cut", "changed"])
def test_a_file_that_is_not_packed_as_its_name_says_is_named_and_its_store_is_not_blamed(
    tmp_path, ending, damage
):
    rows = [{"prompt": f"What is {number}?", "answer": str(number)} for number in range(2000)]
    text = "\n".join(map(json.dumps, rows))
    if ending.startswith("csv"):
        text = "\n".join(["prompt,answer", *(",".join(row.values()) for row in rows)])
    kind = "gzip" if ending.endswith("gz") else "zstd"
    packed = bytearray(pa.compress(text.encode(), codec=kind, asbytes=True))
    if damage == "plain":
        packed = text.encode()
    elif damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[:4] = b"abcd"
    (tmp_path / f"rows.{ending}").write_bytes(packed)
    source = str(tmp_path / f"rows.{ending}")
    with pytest.raises(DataError, match=f"of {kind} and cannot be unpacked") as raised:
        import_data(ImportRequest(sources=[source], to=str(tmp_path / "table")))
    assert "storage" not in str(raised.value)
