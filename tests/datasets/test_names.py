"""A source that is there is read by its very name, and no folder above it becomes a column."""

from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import join, open_fs, open_table, write_atomic

from siirl_dask.datasets.importing import ImportRequest, import_data
from tests.names import NEIGHBOURS


def json_lines(value):
    return f'{{"prompt": "p", "answer": "{value}"}}\n'.encode()


def csv(value):
    return f"prompt,answer\np,{value}\n".encode()


def parquet(value):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["p"], "answer": [value]}), sink)
    return sink.getvalue().to_pybytes()


KINDS = {".jsonl": json_lines, ".csv": csv, ".parquet": parquet}


def imported(source, base):
    to = join(base, f"to-{uuid4().hex}")
    import_data(ImportRequest(sources=[source], to=to))
    return open_table(to).to_table().select(["prompt", "answer"]).to_pylist()


def check_source(store, names, above, ending):
    base = join(store, uuid4().hex)
    for value, name in zip(("mine", "other"), names, strict=True):
        for file in (join(base, above, f"{name}{ending}"), join(base, above, name, f"1{ending}")):
            write_atomic(*open_fs(file), KINDS[ending](value))
    rows = [{"prompt": "p", "answer": "mine"}]
    assert imported(join(base, above, f"{names[0]}{ending}"), base) == rows
    assert imported(join(base, above, names[0]), base) == rows
    assert imported(join(base, above, names[0], f"*{ending}"), base) == rows


EXAMPLES = {"local": 15, "memory": 40, "s3": 2}


@pytest.mark.parametrize("store_url", EXAMPLES, indirect=True)
def test_no_name_leads_to_the_rows_of_another(store_url, request):
    kind = request.node.callspec.params["store_url"]

    @settings(max_examples=EXAMPLES[kind])
    @given(names=NEIGHBOURS, above=NEIGHBOURS, ending=st.sampled_from(sorted(KINDS)))
    def check(names, above, ending):
        check_source(store_url, names, above[0], ending)

    for ending in KINDS if kind != "s3" else [".jsonl"]:
        check_source(store_url, ("train[1]*?", "train1XX"), "answer=7/prompt=z", ending)
    check()


def test_a_pattern_is_one_where_no_file_has_its_name(tmp_path):
    for number in (1, 2, 3):
        (tmp_path / f"train{number}.jsonl").write_bytes(json_lines(number))
    rows = imported(str(tmp_path / "train[12].jsonl"), str(tmp_path))
    assert [row["answer"] for row in rows] == ["1", "2"]
