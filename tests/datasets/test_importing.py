"""An import gives the rows of its sources, whatever their kind, or nothing."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import TableNotFound, join, open_fs, open_table

from siirl_dask.config import Config, DataConfig
from siirl_dask.coordinator.dataloader import Dataloader, Source, open_source
from siirl_dask.datasets import ColumnMapping, ImportRequest, PromptLengths, import_data, parse_type
from siirl_dask.errors import ConfigError, DataError, UserError
from siirl_dask.rollout.tokenizer import load_tokenizer
from siirl_dask.schema import IDENTITY, ORIGIN
from tests.datasets.kinds import KINDS, ROWS, TABLE, json_lines, parquet, stream

MESSAGE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def imported(*sources, to, **how):
    return import_data(ImportRequest(sources=list(sources), to=str(to), **how))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_source_gives_the_same_table(kind, tmp_path):
    # CSV is text
    mapping = ColumnMapping(types=dict(zip(TABLE.schema.names, TABLE.schema.types, strict=True)))
    table = imported(kind(tmp_path), to=tmp_path / "table", mapping=mapping)
    assert table.to_table().equals(TABLE)
    assert open_table(str(tmp_path / "table")).version == 1


def test_sources_and_tables_are_on_any_store(store_url, tmp_path):
    for write in (parquet, json_lines):
        name = write(tmp_path)
        fs, path = open_fs(join(store_url, "raw"))
        fs.makedirs(path, exist_ok=True)
        fs.put_file(name, f"{path}/{name.rpartition('/')[2]}")
    to = join(store_url, "table")
    sources = [join(store_url, "raw", name) for name in ("*.parquet", "rows.jsonl")]
    assert (
        imported(*sources, to=to)
        .to_table()
        .equals(pa.concat_tables([TABLE, TABLE]).combine_chunks())
    )
    assert imported(to, to=join(store_url, "again")).num_rows == 2 * len(ROWS)


blobs = st.lists(st.one_of(st.none(), st.binary(max_size=40)), min_size=1, max_size=60)


@given(blobs=blobs, nbytes=st.integers(1, 400))
@settings(max_examples=25)
def test_row_groups_keep_to_their_bytes_and_rows_to_their_order(blobs, nbytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    table = pa.table({"image": pa.array(blobs, pa.binary()), "at": range(len(blobs))})
    pq.write_table(table, folder / "a.parquet")
    made = imported(str(folder / "a.parquet"), to=folder / "table", row_group_bytes=nbytes)
    assert made.to_table().equals(table)
    groups = [made.read_row_group(group) for group in made.row_groups()]
    assert all(group.num_rows == 1 or group.nbytes <= nbytes for group in groups)


def test_columns_are_taken_from_structs_and_lists(tmp_path):
    rows = [
        {
            "q": "a",
            "reward_model": {"ground_truth": "1"},
            "images": [{"bytes": b"x", "path": "p"}, {"bytes": b"y"}],
        },
        {"q": "b", "reward_model": None, "images": None},
        {"q": "c", "reward_model": {"ground_truth": None}, "images": []},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    mapping = ColumnMapping(
        columns={
            "answer": "reward_model.ground_truth",
            "images": "images.bytes",
            "n": "reward_model.ground_truth",
        },
        types={"n": pa.int8()},
        drop=["reward_model"],
    )
    made = imported(str(tmp_path / "a.parquet"), to=tmp_path / "table", mapping=mapping)
    assert made.schema.field("n").type == pa.int8()
    assert made.to_table().to_pylist() == [
        {"q": "a", "images": [b"x", b"y"], "answer": "1", "n": 1},
        {"q": "b", "images": None, "answer": None, "n": None},
        {"q": "c", "images": [], "answer": None, "n": None},
    ]


def test_values_that_appear_late_decide_a_type(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(f'{{"p": "x", "n": {n}, "e": null}}' for n in range(30_000))
        + '\n{"p": "2020-01-01", "n": "seven", "e": {"late": 1}, "more": 2.5}'
    )
    made = imported(str(tmp_path / "a.jsonl"), to=tmp_path / "table")
    last = made.to_table().slice(30_000).to_pylist()
    assert last == [{"p": "2020-01-01", "n": "seven", "e": {"late": 1}, "more": 2.5}]
    assert made.to_table(["n"])["n"][29_999].as_py() == "29999"


def test_rows_that_change_the_types_late_are_counted_and_written_once(tmp_path):
    lines = [json.dumps({"prompt": f"row {row} {'x' * 3000}"}) for row in range(1000)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, '{"prompt": "last", "late": [1]}']))
    lengths = PromptLengths(
        prompt="prompt", measure=lambda prompts: [len(prompt) for prompt in prompts]
    )
    mapping = ColumnMapping(columns={"n": "late"})
    table = imported(
        str(tmp_path / "rows.jsonl"), to=tmp_path / "table", mapping=mapping, prompts=lengths
    )
    assert lengths.lengths.count == table.num_rows == 1001
    assert table.to_table()["n"].to_pylist() == [None] * 1000 + [[1]]
    assert len(list((tmp_path / "table" / "data").iterdir())) == len(table.parts)


def test_several_sources_get_the_widest_types_and_tell_where_rows_are_from(tmp_path):
    pq.write_table(pa.table({"n": pa.array([1], pa.int32()), "t": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"t": pa.array([None], pa.null()), "n": pa.array([2], pa.int64())}),
        tmp_path / "b.parquet",
    )
    sources = [str(tmp_path / name) for name in ("b.parquet", "a.parquet")]
    made = imported(*sources, to=tmp_path / "table", source_column="from")
    assert made.to_table().to_pylist() == [
        {"t": None, "n": 2, "from": sources[0]},
        {"t": "a", "n": 1, "from": sources[1]},
    ]


WORDS = pa.array(["a", "b", None, "a"]).dictionary_encode()
OFFSETS = pa.array([0, 1, 2, 3, 4], pa.int32())
DECODED = {
    "dictionary": (WORDS, pa.string()),
    "in a list": (pa.ListArray.from_arrays(OFFSETS, WORDS), pa.list_(pa.string())),
    "in a struct": (pa.StructArray.from_arrays([WORDS], ["x"]), pa.struct({"x": pa.string()})),
    "in a map": (
        pa.MapArray.from_arrays(OFFSETS, pa.array(list("klmn")), WORDS),
        pa.map_(pa.string(), pa.string()),
    ),
    "string_view": (pa.array(["a", None, "b" * 40, ""], pa.string_view()), pa.string()),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 4], pa.int32()), pa.array(["a", "b"])),
        pa.string(),
    ),
    "list_view": (
        pa.array([["a"], None, [], ["b", "c"]], pa.list_view(pa.string())),
        pa.list_(pa.string()),
    ),
    "large_list_view": (
        pa.array([["a"], None, [], ["b", "c"]], pa.large_list_view(pa.string_view())),
        pa.large_list(pa.string()),
    ),
    "views in a struct": (
        pa.array(
            [{"x": ["a"]}, None, {"x": None}, {"x": ["b", "c"]}],
            pa.struct({"x": pa.list_view(pa.string())}),
        ),
        pa.struct({"x": pa.list_(pa.string())}),
    ),
    "seconds": (pa.array([1, None, 2, 3], pa.timestamp("s", "UTC")), pa.timestamp("ms", "UTC")),
    "date64": (pa.array([86_400_000, None, 0, 0], pa.date64()), pa.date32()),
    "uint64": (pa.array([2**64 - 1, None, 0, 1], pa.uint64()), pa.uint64()),
    "float16": (pa.array([1.5, None, 2, 3], pa.float16()), pa.float16()),
    "decimal": (
        pa.array(["1.10", None, "2.25", "3.00"]).cast(pa.decimal256(50, 2)),
        pa.decimal256(50, 2),
    ),
    "map": (pa.array([[("a", 1)], None, [], [("b", None)]], pa.map_(pa.string(), pa.int64())),) * 2,
    "json": (
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", None, "{}", "[]"])),
        pa.string(),
    ),
    "large": (pa.array(["a", None, "b", ""], pa.large_string()), pa.large_string()),
}


@pytest.mark.parametrize("name", DECODED)
def test_values_of_any_arrow_type_come_back_equal(name, tmp_path):
    array, kind = DECODED[name]
    source = stream(tmp_path, "a.arrow", pa.table({"x": array}))
    made = imported(source, to=tmp_path / "table").to_table()
    assert made.schema.field("x").type == (array.type if name == "map" else kind)
    assert made["x"].to_pylist() == array.to_pylist()


def test_a_type_that_no_table_has_is_refused_by_name(tmp_path):
    union = pa.UnionArray.from_sparse(
        pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
    )
    source = stream(tmp_path, "a.arrow", pa.table({"x": union, "y": [1, 2]}))
    with pytest.raises(DataError, match=r"'x' is sparse_union.*no table has this type"):
        imported(source, to=tmp_path / "table")
    dropped = imported(source, to=tmp_path / "table", mapping=ColumnMapping(drop=["x"]))
    assert dropped.schema.names == ["y"]


def everything_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_interrupted_import_leaves_nothing(tmp_path):
    def stop(rows, nbytes, total):
        if rows > 20_000:
            raise KeyboardInterrupt

    rows = pa.table({"prompt": ["x" * 4000] * 40_000})
    pq.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(KeyboardInterrupt):
        import_data(
            ImportRequest(sources=[str(tmp_path / "a.parquet")], to=str(tmp_path / "table")), stop
        )
    assert everything_below(tmp_path / "table") == []


KILLED = """
import os, signal, sys
from pathlib import Path
from siirl_dask.datasets import ImportRequest, import_data
def stop(rows, nbytes, total):
    if list(Path(sys.argv[2]).glob("data/*.parquet")): os.kill(os.getpid(), signal.SIGKILL)
import_data(ImportRequest(sources=[sys.argv[1]], to=sys.argv[2]), stop)
"""


def test_a_killed_import_leaves_no_table_and_does_not_hinder_the_next(tmp_path):
    pq.write_table(
        pa.table({"prompt": [f"{row}{'x' * 4000}" for row in range(60_000)]}),
        tmp_path / "a.parquet",
    )
    paths = [str(tmp_path / "a.parquet"), str(tmp_path / "table")]
    assert subprocess.run([sys.executable, "-c", KILLED, *paths], timeout=60).returncode == -9
    assert everything_below(tmp_path / "table"), "it was killed before a part was written"
    with pytest.raises(TableNotFound):
        open_table(paths[1])
    assert imported(paths[0], to=paths[1]).num_rows == 60_000


def test_of_two_imports_to_one_place_one_wins_whole(tmp_path):
    source, to = parquet(tmp_path), str(tmp_path / "table")

    def meanwhile(rows, nbytes, total):
        if rows == len(ROWS):
            imported(source, to=to)

    with pytest.raises(DataError, match="another process made a table there meanwhile"):
        import_data(ImportRequest(sources=[source], to=to), meanwhile)
    assert open_table(to).to_table().equals(TABLE)


def test_rows_are_appended_only_where_that_is_asked_for(tmp_path):
    source, to = parquet(tmp_path), str(tmp_path / "table")
    imported(source, to=to, append=True)
    with pytest.raises(DataError, match=r"a table is at .* already"):
        imported(source, to=to)
    assert imported(source, to=to, append=True).num_rows == 2 * len(ROWS)
    with pytest.raises(DataError, match="lacks column 'seen'"):
        imported(source, to=to, append=True, mapping=ColumnMapping(drop=["seen"]))
    assert open_table(to).num_rows == 2 * len(ROWS)


MEMORY = """
import resource, sys
from siirl_dask.datasets import ImportRequest, import_data
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_data(ImportRequest(sources=[sys.argv[1]], to=sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_import_takes_a_few_parts_of_memory_however_large_a_row_group_is(tmp_path):
    text = "".join(map(chr, range(32, 127))) * 110  # 10 kB
    table = pa.table({"prompt": [f"{number}{text}" for number in range(45_000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    paths = [str(tmp_path / "a.parquet"), str(tmp_path / "table")]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 0.8 * table.nbytes
    assert open_table(paths[1]).num_rows == table.num_rows


def test_token_lengths_are_those_that_training_goes_by(digits_task, tmp_path):
    tokenizer = load_tokenizer(str(digits_task.model), "model")
    table = pa.table({"prompt": ["x" * length for length in (3, 9, 4, 9)]})
    pq.write_table(table, tmp_path / "a.parquet")
    prompts = PromptLengths(prompt="prompt", measure=tokenizer.lengths, column="length")
    made = imported(str(tmp_path / "a.parquet"), to=tmp_path / "table", prompts=prompts)
    expected = [len(tokenizer.encode(prompt)) for prompt in table["prompt"].to_pylist()]
    assert made.to_table(["length"])["length"].to_pylist() == expected
    assert prompts.lengths.longer_than(8) == sum(length > 8 for length in expected) == 2
    plain = PromptLengths(prompt="prompt", measure=tokenizer.lengths)
    assert imported(
        str(tmp_path / "a.parquet"), to=tmp_path / "plain", prompts=plain
    ).schema.names == ["prompt"]


def test_messages_are_as_long_as_their_chat_template_makes_them(tmp_path):
    from siirl_dask.tasks.tiny_model import tiny_model

    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    tiny_model(tmp_path / "model", chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path / "model"), "model")
    chats = [[{"role": "user", "content": "x" * length}] for length in (1, 5)]
    assert tokenizer.lengths(chats) == [len(tokenizer.encode(chat)) for chat in chats]
    assert tokenizer.lengths(chats)[0] == len("user: x assistant:")


def test_rows_in_the_layout_of_verl_and_siirl_train_as_they_are(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "answer": "#### 2"},
    }
    pq.write_table(pa.Table.from_pylist([row] * 3), tmp_path / "train.parquet")
    imported(str(tmp_path / "train.parquet"), to=tmp_path / "table")
    for url in (tmp_path / "train.parquet", tmp_path / "table"):
        config = Config(data=DataConfig(url=str(url), answer="reward_model.ground_truth"))
        loader = Dataloader(Source.of(config.data, batch_size=2, seed=0))
        loaded = loader.load(0, ["prompt", "answer", "data_source", "extra_info"], 0, 1).to_pylist()
        loader.close()
        named = {"prompt": row["prompt"], "answer": "2", "data_source": row["data_source"]}
        assert loaded == [{**named, "extra_info": row["extra_info"]}] * 2


def test_many_files_are_opened_side_by_side_in_order(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda n: pq.write_table(pa.table({"n": [n]}), tmp_path / f"{n:03d}.parquet"),
                range(40),
            )
        )
    made = imported(str(tmp_path / "*.parquet"), to=tmp_path / "table")
    assert made.to_table()["n"].to_pylist() == list(range(40))


@pytest.mark.parametrize(
    ("files", "source", "said"),
    [
        ({}, "rows.jsonl", "there is nothing at"),
        ({"rows.jsonl": "{}"}, "rwos.jsonl", "did you mean 'rows.jsonl'"),
        ({"a.txt": "x"}, "a.txt", "of no known kind: expected a name that ends in .parquet"),
        ({"a.txt": "x"}, "*.txt", "no files at"),
        ({"a.parquet": "not"}, "a.parquet", "a.parquet cannot be read"),
        ({"a.arrow": "not Arrow at all"}, "a.arrow", "a.arrow"),
        ({"a.jsonl": '{"x": 1\n'}, "a.jsonl", "a.jsonl cannot be read"),
        ({"a.jsonl": ""}, "a.jsonl", "a.jsonl"),
        ({"a.csv": "x\n"}, "a.csv", "there are no rows"),
        (
            {"d/train.jsonl": "{}", "d/test.jsonl": "{}"},
            "d",
            r"several splits \(test, train\): name one, as in .*train",
        ),
        ({"d/a.jsonl": "{}", "d/b.csv": "x"}, "d", r"several kinds \(CSV, JSON\)"),
        (
            {"d/dataset_dict.json": '{"splits": ["train", "test"]}'},
            "d",
            "name one of .*d/train, .*d/test",
        ),
        ({"d/dataset_info.json": "{}", "d/state.json": "[]"}, "d", "is no JSON object"),
        (
            {
                "d/dataset_info.json": "{}",
                "d/state.json": '{"_data_files": [{"filename": "../a.arrow"}]}',
            },
            "d",
            "lists no data files below it",
        ),
        ({"a.jsonl": '{"x": 1, "x": 2}'}, "a.jsonl", "a.jsonl"),
        ({"a.jsonl": '{"tokens": 1}'}, "a.jsonl", "--column OTHER=tokens --drop tokens"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused_by_name_before_anything_is_written(
    files, source, said, tmp_path
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        imported(str(tmp_path / source), to=tmp_path / "table")
    assert everything_below(tmp_path / "table") == []


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (ColumnMapping(columns={"x": "prmpt"}), "did you mean 'prompt'"),
        (ColumnMapping(columns={"x": "prompt.text"}), "no 'text'"),
        (ColumnMapping(select=["prompt", "anwser"]), "--select anwser: .*did you mean 'answer'"),
        (ColumnMapping(drop=["promt"]), "--drop promt"),
        (ColumnMapping(types={"seem": pa.string()}), "--type seem=...: .*did you mean 'seen'"),
        (
            ColumnMapping(types={"prompt": pa.int64()}),
            "column 'prompt' holds string, and its value in row 1 is no int64: ",
        ),
        (ColumnMapping(types={"prompt": parse_type("float")}), "its value in row 1 is no float: "),
        (
            ColumnMapping(types={"prompt": parse_type("float32")}),
            "its value in row 1 is no float32: ",
        ),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused_by_name(mapping, said, tmp_path):
    with pytest.raises(DataError, match=said):
        imported(parquet(tmp_path), to=tmp_path / "table", mapping=mapping)
    assert everything_below(tmp_path / "table") == []


def test_sources_that_do_not_go_together_are_refused_by_name(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "c.parquet")
    with pytest.raises(
        DataError, match=r"column 'a' is int64 in .*a.parquet' and string in .*--type a=string"
    ):
        imported(
            *(str(tmp_path / name) for name in ("a.parquet", "b.parquet")), to=tmp_path / "table"
        )
    with pytest.raises(DataError, match=r"lacks the column 'a' that .*a.parquet' has"):
        imported(
            *(str(tmp_path / name) for name in ("a.parquet", "c.parquet")), to=tmp_path / "table"
        )


def test_whole_numbers_do_not_become_fractions_beside_those_of_another_source(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": {"b": [5]}, "id": "1"}')
    (tmp_path / "b.jsonl").write_text('{"a": {"b": [0.5]}, "id": "2"}')
    with pytest.raises(
        DataError, match=r"column 'a' is .*int64.* in .*a.jsonl' and .*double.* in .*b.jsonl'"
    ):
        imported(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), to=tmp_path / "table")
    both = imported(str(tmp_path / "*.jsonl"), to=tmp_path / "table").to_table()
    assert both["a"].to_pylist() == [{"b": ["5"]}, {"b": ["0.5"]}]


@pytest.mark.parametrize("text", ["int46", "list<>", "list<texts>", "struct<a: int64>", ""])
def test_a_type_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"expected list<...> or one of text, int, float"):
        parse_type(text)
    assert parse_type(" list<list<float32>> ") == pa.list_(pa.list_(pa.float32()))
    assert [parse_type(short) for short in ("text", "int", "float")] == [
        pa.string(),
        pa.int64(),
        pa.float64(),
    ]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("rows.csv", "DEST='rows.csv' is a file, and a table is a folder"),
        ("s3:/bucket/rows", "DEST='s3:/bucket/rows': expected s3:// with two slashes"),
        ("$HOME/rows", "DEST='$HOME/rows': no shell reads this"),
    ],
)
def test_a_place_that_cannot_be_meant_is_refused_before_a_folder_is_made(
    place, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    with pytest.raises(UserError, match=re.escape(said)):
        imported("rows.csv", to=place)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("nothing", ["", " "])
def test_an_empty_name_is_no_place_and_no_source(nothing, tmp_path, monkeypatch):
    json_file = tmp_path / "a.jsonl"
    json_file.write_text('{"prompt": "a"}\n')
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)  # where a table would be made
    with pytest.raises(DataError, match=r"DEST=.*expected the place of a table"):
        imported(str(json_file), to=nothing)
    assert list(empty.iterdir()) == []
    with pytest.raises(DataError, match="names no source"):
        imported(nothing, to=tmp_path / "t")


@pytest.mark.parametrize("name", [*IDENTITY, *ORIGIN])
def test_a_name_that_no_run_takes_is_refused_by_the_import_too(name, tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"], name: [0]}), tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=name):
        open_source(Source(url=file, prompt="prompt", answer="answer"))
    with pytest.raises(DataError, match=f"'{name}' has a name that training needs for itself"):
        imported(file, to=tmp_path / "table")
    table = imported(file, to=tmp_path / "table", mapping=ColumnMapping(drop=[name]))
    open_source(Source(url=table.base, prompt="prompt", answer="answer"))
