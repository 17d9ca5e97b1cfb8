"""``siirl-dask data`` as a user types it: what it prints, and what it refuses."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from siirl_storage import open_table

from siirl_dask.cli import main
from siirl_dask.datasets.lengths import LengthDistribution, characters
from siirl_dask.datasets.summary import summarise
from tests.datasets.kinds import KINDS
from tests.images.pictures import png
from tests.settings import digits_overrides


def said(capsys, *arguments):
    main(["data", *map(str, arguments)])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["data", *map(str, arguments)])
    return capsys.readouterr().err


UNCOUNTED = ("stream", "json_lines", "compressed", "json_array", "comma_separated", "saved")
"""Kinds of files that tell their rows only when they are read."""


@pytest.fixture
def prompts(write):
    lines = (
        f'{{"prompt": "{"x" * length}", "answer": {{"value": {length}}}}}'
        for length in (3, 30, 300)
    )
    return write("\n".join(lines), "rows.jsonl")


def test_an_import_tells_what_it_has_written(capsys, prompts, digits_task):
    options = ["--column", "answer=answer.value:text", "--length-column", "n"]
    tokens = ["--tokenizer", digits_task.model, "--max-prompt-length", 30]
    text = said(capsys, "import", prompts, *options, "table", *tokens)
    assert "3 rows" in text
    assert "1 part and 1 row group" in text
    assert "columns: prompt: string, answer: string, n: int64" in text
    assert "1 of 3 prompts (33.33%) are longer than 30 tokens" in text
    assert "shortest 3, median 30, 90 % 300, 99 % 300, longest 300" in text
    assert open_table("table").to_table(["answer"])["answer"].to_pylist() == ["3", "30", "300"]


def test_chat_makes_the_prompts_that_a_chat_model_is_shown(capsys, write):
    rows = write('{"question": "2+2?", "answer": "4"}', "rows.jsonl")
    said(capsys, "import", rows, "table", "--chat", "question", "--system", "Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert open_table("table").to_table().to_pylist() == [
        {"question": "2+2?", "answer": "4", "prompt": chat}
    ]
    said(
        capsys, "import", rows, "own", "--chat", "question", "--prompt", "asked", "--drop", "answer"
    )
    assert open_table("own").to_table().column_names == ["question", "asked"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--chat", "questoin"], "did you mean 'question'"),
        (["--chat", "number"], "--chat number makes messages of texts, not of int64"),
        (["--chat", "question", "--column", "prompt=question"], "both make the column 'prompt'"),
        (["--chat", "question", "--type", "prompt=text"], "--type prompt=...: --chat question"),
        (["--system", "Be brief."], "give --chat as well"),
    ],
)
def test_messages_that_cannot_be_made_are_refused(options, reason, capsys, write):
    rows = write('{"question": "2+2?", "number": 4}', "rows.jsonl")
    assert reason in refused(capsys, "import", rows, "table", *options)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_show_looks_into_whatever_can_be_imported(kind, capsys, tmp_path):
    (tmp_path / "again").mkdir()
    text = said(capsys, "show", kind(tmp_path), "--samples", 2)
    assert ("double" in text) is (kind.__name__ != "comma_separated")
    for word in (
        "prompt",
        "answer",
        "weight",
        "Lengths of prompt, in characters",
        "Sample 2",
        "0 + 1?",
    ):
        assert word in text
    assert "12 rows" in text.splitlines()[0]
    fewer = said(capsys, "show", kind(tmp_path / "again"), "--rows", 5).splitlines()
    assert ("rows are not counted" in fewer[0]) is (kind.__name__ in UNCOUNTED)


def test_show_measures_a_column_of_messages_by_whatever_name(capsys, write):
    messages = [{"role": "user", "content": "2+2?"}]
    rows = write(json.dumps({"answer": "4", "messages": messages}), "rows.jsonl")
    assert "Lengths of messages, in characters" in said(capsys, "show", rows)


def test_a_folder_of_a_model_is_no_dataset(capsys, digits_task, tmp_path):
    task = dict(one.split("=", 1) for one in digits_overrides(digits_task, tmp_path))
    for arguments in (["show"], ["import"]):
        target = [tmp_path / "t"] if arguments == ["import"] else []
        err = refused(capsys, *arguments, task["model.path"], *target)
        assert "holds a model, and no rows" in err


def test_show_counts_tokens_where_a_tokenizer_is_given(capsys, prompts, digits_task):
    text = said(
        capsys, "show", prompts, "--tokenizer", digits_task.model, "--max-prompt-length", 29
    )
    assert "2 of 3 prompts (66.67%) are longer than 29 tokens" in text


def test_nothing_in_a_dataset_commands_the_terminal(capsys, tmp_path):
    table = pa.table(
        {
            "prompt": ["\x1b[2J[red]x[/red]\u202e"],
            "image": [b"\x89PNG" + bytes(5000)],
            "\x1b[1mname": [1],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    text = said(capsys, "show", tmp_path / "a.parquet")
    assert not {"\x1b", "\u202e"} & set(text)
    assert "[red]x[/red]" in text
    assert "<PNG, damaged, 5.1 kB>" in text


def test_show_says_what_images_are_and_how_large(capsys, tmp_path):
    first, second = png(64, 48), png(16, 16)
    rows = [[{"bytes": first, "path": None}, {"bytes": second, "path": None}], []]
    images = pa.array(rows, pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    pq.write_table(
        pa.table({"prompt": ["<image><image>?", "?"], "images": images}), tmp_path / "a.parquet"
    )
    text = said(capsys, "show", tmp_path / "a.parquet")
    shown = " ".join(text.split())
    assert "<PNG, 64 x 48 pixels, " in shown
    assert "<PNG, 16 x 16 pixels, " in shown
    (line,) = [line for line in text.splitlines() if line.strip().startswith("images ")]
    assert line.split()[-1] == f"{len(first) + len(second):,}"


def test_show_reads_no_more_rows_than_asked_for_and_from_all_over(tmp_path):
    for number in range(50):
        rows = {"prompt": [f"{number}:{row}" for row in range(100)]}
        pq.write_table(pa.table(rows), tmp_path / f"{number:02d}.parquet")
    found = summarise(str(tmp_path), measure=characters, rows=64, samples=40)
    assert (found.read, found.pieces, found.rows, found.lengths.count) == (64, 32, 5000, 64)
    parts = [int(row["prompt"].partition(":")[0]) for row in found.samples]
    assert len(parts) == 40
    assert max(b - a for a, b in zip(sorted(set(parts)), sorted(set(parts))[1:], strict=False)) <= 2
    assert min(parts) == 0
    assert max(parts) >= 48
    assert summarise(str(tmp_path), measure=characters).read == 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "rows.jsonl"], "expected sources and then a destination"),
        (
            ["import", "rows.jsonl", "t", "--column", "answer"],
            "--column 'answer': expected --column NAME=VALUE",
        ),
        (
            ["import", "rows.jsonl", "t", "--column", "a=answer:int", "--type", "a=text"],
            "gives it a type too",
        ),
        (["import", "rows.jsonl", "t", "--column", "a=answer:itn"], "has no column 'answer:itn'"),
        (
            ["import", "rows.jsonl", "t", "--separator", "tab"],
            "--separator 'tab': expected one character",
        ),
        (["import", "rows.jsonl", "t", "--type", "answer=strin"], "did you mean 'string'"),
        (
            ["import", "rows.jsonl", "t", "--type", "a=string", "--type", "a=int8"],
            "'a' was given before, as 'string'",
        ),
        (
            ["import", "rows.jsonl", "t", "--select", "a,,b"],
            "expected different names with commas between them",
        ),
        (
            ["import", "rows.jsonl", "t", "--max-prompt-length", "5"],
            "--max-prompt-length counts tokens, and needs",
        ),
        (
            ["import", "rows.jsonl", "t", "--row-group-bytes", "many"],
            "--row-group-bytes='many': expected a number of",
        ),
        (["import", "rows.jsonl", "t", "--row-group-bytes", "0"], "expected at least 1 byte"),
        (
            ["import", "rows.jsonl", "t", "--tokenizer", "nowhere"],
            "--tokenizer 'nowhere': no such folder",
        ),
        (
            ["import", "rows.jsonl", "t", "--source-column", "prompt"],
            "column 'prompt' is there already",
        ),
        (
            ["import", "rows.jsnl", "t"],
            "there is nothing at 'rows.jsnl'; did you mean 'rows.jsonl'",
        ),
        (["import", "rows.jsonl", "s4://bucket/t"], "Protocol not known: s4"),
        (["import", "rows.jsonl", "t", "--colour", "a=b"], "unrecognized arguments: --colour"),
        (["show", "rows.jsonl", "--prompt", "promt"], "did you mean 'prompt'"),
        (["show", "rows.jsonl", "--prompt", "answer"], "column 'answer' holds struct"),
        (["show", "rows.jsonl", "--samples", "-1"], "expected 0 or more"),
        (["show", "nothing"], "there is nothing at 'nothing'"),
    ],
)
def test_a_mistake_is_refused_by_name(arguments, message, capsys, prompts, tmp_path):
    assert message in refused(capsys, *arguments)
    assert not (tmp_path / "t").exists()


def test_stopping_an_import_says_that_nothing_is_there(capsys, prompts, monkeypatch):
    import siirl_dask.datasets.importing as importing

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "open_inputs", stop)
    with pytest.raises(SystemExit, match="130"):
        main(["data", "import", prompts, "table"])
    assert "stopped by the user: there is nothing new at table" in capsys.readouterr().err


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_a_histogram_counts_every_length_once_and_quantiles_are_exact(values):
    lengths = LengthDistribution()
    lengths.add([*values, None])
    bins = lengths.bins()
    assert sum(count for *_, count in bins) == len(values) == lengths.count
    for first, last, count in bins:
        assert count == sum(first <= value and (last is None or value <= last) for value in values)
    assert len(bins) <= 14
    ordered = sorted(values)
    assert (lengths.quantile(0), lengths.quantile(1)) == (ordered[0], ordered[-1])
    assert lengths.quantile(0.5) == ordered[(len(values) + 1) // 2 - 1]
    assert lengths.longer_than(100) == sum(value > 100 for value in values)
    assert lengths.nulls == 1


def test_characters_are_those_of_all_messages():
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "image"}]}]
    assert characters(
        ["abcd", [{"role": "user", "content": "ab"}, {"role": "x", "content": "c"}], parts]
    ) == [4, 3, 3]
