"""A file that is no text, whatever its name, is named by its content, with what to do."""

from __future__ import annotations

import gzip
import zipfile
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.coordinator.source import Source, open_source
from siirl_dask.errors import DataError

TEXT = '{"prompt": "a", "answer": "1"}\n'


def as_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside", TEXT)


CONTENT = {
    "in UTF-16": lambda path: path.write_bytes(TEXT.encode("utf-16")),
    "packed by gzip": lambda path: path.write_bytes(gzip.compress(TEXT.encode())),
    "packed by zstd": lambda path: path.write_bytes(
        pa.compress(TEXT.encode(), codec="zstd", asbytes=True)
    ),
    "a ZIP archive": as_zip,
    "a Parquet file": lambda path: pq.write_table(pa.table({"prompt": ["é" * 99]}), path),
    "expected a text in UTF-8": lambda path: path.write_bytes(
        TEXT.replace("a", "é").encode("latin-1")
    ),
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("said", CONTENT)
def test_a_file_that_is_no_text_is_named_by_what_it_is(tmp_path, capsys, said, ending):
    path = tmp_path / f"rows.{ending}"
    CONTENT[said](path)
    with pytest.raises(SystemExit) as ended:
        main(["data", "import", str(path), str(tmp_path / "table")])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert str(path) in printed
    assert not (tmp_path / "table").exists()


TEXTS = ("jsonl", "json", "csv", "tsv", "csv.gz", "jsonl.zst")
TABLES = ("parquet", "arrow", "feather")
STAND_INS = {
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
    "a web page": b"\n<!DOCTYPE html>\n<html><body>404, no such file</body></html>\n",
}


@pytest.mark.parametrize(
    ("reader", "ending"),
    [*product(["import", "show"], [*TEXTS, *TABLES]), *product(["run"], TABLES)],
)
@pytest.mark.parametrize("said", STAND_INS)
def test_what_stands_in_the_place_of_a_file_is_named(tmp_path, capsys, said, ending, reader):
    """A clone without Git LFS has a text of three lines for each file: a table to read CSV."""
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(STAND_INS[said])
    if reader == "run":
        with pytest.raises(DataError) as refused:
            open_source(Source(url=str(path), prompt="prompt", answer="answer"))
        printed = str(refused.value)
    else:
        table = [str(tmp_path / "table")] if reader == "import" else []
        with pytest.raises(SystemExit) as ended:
            main(["data", reader, str(path), *table])
        assert ended.value.code == 2
        printed = capsys.readouterr().err
    assert f"{path} cannot be read: it is {said} in the place of the file" in printed
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("row", ["b", "b,2,3"])
def test_one_field_is_not_several(tmp_path, capsys, row):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,answer\n{row}\n")
    with pytest.raises(SystemExit):
        main(["data", "import", str(path), str(tmp_path / "table")])
    fields = "1 field," if row == "b" else "3 fields,"
    assert f"has {fields} and the first 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "prompts",
    [
        pa.array(["one", "two"]).dictionary_encode(),
        pa.array(["one", None]).dictionary_encode(),
        pa.array(["one", "two"], pa.string_view()),
    ],
    ids=["categories", "categories with null", "views"],
)
def test_prompts_in_whatever_layout_are_shown_as_they_are_trained_on(tmp_path, capsys, prompts):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": prompts, "answer": ["1", "2"]}), path)
    main(["data", "show", str(path)])
    shown = capsys.readouterr().out
    assert "prompt: one" in shown
    main(["data", "import", str(path), str(tmp_path / "table")])
    main(["data", "show", str(tmp_path / "table")])
    assert "prompt: one" in capsys.readouterr().out
