from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import s3fs
from pyarrow import feather
from siirl_storage import Snapshot

from siirl_dask.config import DataConfig
from siirl_dask.coordinator.dataloader import Dataloader, Source, open_source, source_schema
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.schema import ROW_ID

COLUMNS = ("row_id", "group_id", "tokens", "prompt", "answer", "extra")


@pytest.fixture
def url(tmp_path):
    rows = {
        "q": [f"p{i}" for i in range(50)],
        "meta": [{"truth": i} for i in range(50)],
        "extra": list(range(50)),
    }
    pq.write_table(pa.table(rows), tmp_path / "train.parquet", row_group_size=7)
    return str(tmp_path / "train.parquet")


def source(url, **changes):
    return Source(
        **(
            {"url": url, "prompt": "q", "answer": "meta.truth", "batch_size": 8, "seed": 3}
            | changes
        )
    )


def load(url, step, workers):
    loaders = [Dataloader(source(url)) for _ in range(workers)]
    parts = [loader.load(step, COLUMNS, index, workers) for index, loader in enumerate(loaders)]
    for loader in loaders:
        loader.close()
    return pa.concat_tables(parts)


def test_columns_are_renamed_structs_opened_and_others_kept(url):
    table = load(url, 0, 1)
    assert table.column_names == list(COLUMNS)
    assert table["prompt"].to_pylist() == [f"p{i}" for i in table["answer"].to_pylist()]
    assert table["extra"].to_pylist() == table["answer"].to_pylist()


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("prompt", ["q", "q.text", "q.text.en"])
@pytest.mark.parametrize("others", [[], ["q.text"], ["meta", "meta.truth"], ["meta.truth.is"]])
def test_a_name_with_dots_is_a_columns_before_it_is_a_path(tmp_path, ending, prompt, others):
    """json_normalize of pandas and flattened datasets write such names."""
    rows = {name: [f"{name} {row}" for row in range(5)] for name in {prompt, *others}}
    if "meta" in others:
        rows["meta"] = [{"truth": row} for row in range(5)]
    if prompt != "q":
        rows["q"] = [{"text": "of the struct"}] * 5
    file = tmp_path / f"train.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table(rows), file)
    else:
        feather.write_feather(pa.table(rows), file, compression="uncompressed")
    given = source(str(file), prompt=prompt, answer=prompt, batch_size=5, seed=None)
    loader = Dataloader(given)
    table = loader.load(0, ["prompt", "answer", *rows], 0, 1)
    loader.close()
    assert table.to_pydict() == {"prompt": rows[prompt], "answer": rows[prompt], **rows}


def test_a_field_of_a_struct_is_loaded_by_its_path_and_so_is_a_column_of_that_name(tmp_path):
    """As nodes ask for it: paths are those of the dataset, under its names in the plan too."""
    extra = [{"source": name, "n": {"of": row}} for row, name in enumerate("ab")] + [None]
    rows = {"q": ["x"] * 3, "extra": extra, "extra.flat": [7, 8, 9]}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    url = str(tmp_path / "train.parquet")
    loader = Dataloader(source(url, answer="extra.n", batch_size=3, seed=None))
    asked = ["extra.source", "extra.n.of", "extra.flat", "answer.of"]
    table = loader.load(0, asked, 0, 1)
    loader.close()
    assert table.to_pydict() == {
        "extra.source": ["a", "b", None],
        "extra.n.of": [0, 1, None],
        "extra.flat": [7, 8, 9],
        "answer.of": [0, 1, None],
    }


NULL_KEY = {"role": "user", "name": None, "parts": [{"kind": None}, {"kind": None}]}


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("group", [1, 4, 6])
def test_a_key_that_is_null_in_all_messages_is_read(tmp_path, ending, group):
    """pandas and Table.from_pylist give it the type null, whose cast within lists fails."""
    rows = {
        "q": [[NULL_KEY, NULL_KEY], [NULL_KEY], [], None, [NULL_KEY] * 3, [NULL_KEY]],
        "a": [{"tags": [None, None]}, None, {"tags": None}, {"tags": []}, {"tags": [None]}, None],
    }
    file = tmp_path / f"train.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table(rows), file, row_group_size=group)
    else:
        feather.write_feather(pa.table(rows), file, compression="uncompressed", chunksize=group)
    given = source(str(file), answer="a.tags", batch_size=None, seed=None)
    assert open_source(given).to_table().to_pydict() == rows
    loader = Dataloader(given)
    table = loader.load(0, ["prompt", "a"], 0, 1)
    loader.close()
    table = table.cast(table.schema)
    assert table.to_pydict() == {"prompt": rows["q"], "a": rows["a"]}


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_step_is_the_same_on_any_number_of_workers(url, workers):
    for step in (0, 6, 7, 20):
        assert load(url, step, workers).equals(load(url, step, 1))


def test_workers_without_prompts_get_an_empty_typed_table(url):
    loader = Dataloader(source(url, batch_size=3))
    parts = [loader.load(0, COLUMNS, index, 5) for index in range(5)]
    loader.close()
    assert sorted(part.num_rows for part in parts) == [0, 0, 1, 1, 1]
    assert len({part.schema for part in parts}) == 1


def test_any_step_can_be_loaded_first_as_a_resumed_run_does(url):
    loader = Dataloader(source(url))
    in_order = [loader.load(step, COLUMNS, 0, 1) for step in range(9)]
    loader.close()
    assert load(url, 8, 2).equals(in_order[8])


@pytest.mark.parametrize("workers", [1, 3])
def test_every_prompt_leads_back_to_its_row_of_the_dataset(tmp_path, workers):
    """Also those that a step draws, and in a second epoch; a prompt has one number, whoever
    reads it.
    """
    parts = [[f"{part}-{row}" for row in range(rows)] for part, rows in enumerate((9, 1, 14))]
    for part, prompts in enumerate(parts):
        pq.write_table(
            pa.table({"q": prompts, "a": prompts}), tmp_path / f"{part}.parquet", row_group_size=4
        )
    loaders = [Dataloader(source(str(tmp_path), answer="a")) for _ in range(workers)]
    columns, rows = ("row_id", "prompt", "prompt_number", "data_part", "data_row"), []
    for step in range(5):
        for at, loader in enumerate(loaders):
            rows += loader.load(step, columns, at, workers).to_pylist()
        if step == 1:
            rows += [
                row
                for at, one in enumerate(loaders)
                for row in one.draw_prompts(3, columns, at, workers).to_pylist()
            ]
    for loader in loaders:
        loader.close()
    assert all(parts[row["data_part"]][row["data_row"]] == row["prompt"] for row in rows)
    assert sorted(row["prompt_number"] for row in rows) == list(range(43))
    assert len({row["prompt"] for row in rows if row["prompt_number"] < 24}) == 24


def test_without_a_batch_size_everything_comes_in_table_order(url):
    loader = Dataloader(source(url, batch_size=None, seed=None))
    assert loader.load(0, COLUMNS, 0, 1)["extra"].to_pylist() == list(range(50))
    loader.close()


def test_only_the_columns_asked_for_are_read(url, monkeypatch):
    read, read_row_group = [], Snapshot.read_row_group

    def recorded(snapshot, group, columns, **options):
        read.append(tuple(columns))
        return read_row_group(snapshot, group, columns, **options)

    monkeypatch.setattr(Snapshot, "read_row_group", recorded)
    loader = Dataloader(source(url))
    assert loader.load(0, (ROW_ID, "prompt"), 0, 1).column_names == [ROW_ID, "prompt"]
    loader.close()
    assert set(read) == {("q",)}


def test_a_missing_dataset_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        open_source(source(str(tmp_path / "nowhere")))


def test_storage_without_credentials_is_a_data_error_that_names_the_dataset(monkeypatch, tmp_path):
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(
        DataError, match=r"dataset 's3://bucket/rows': its storage cannot be reached: NoCredentials"
    ):
        open_source(source("s3://bucket/rows"))
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_empty_dataset_is_refused(tmp_path):
    pq.write_table(
        pa.table({"q": pa.array([], pa.string()), "a": pa.array([], pa.string())}),
        tmp_path / "e.parquet",
    )
    with pytest.raises(DataError, match="no rows"):
        open_source(source(str(tmp_path / "e.parquet"), answer="a"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"prompt": "Q"}, "'Q'"), ({"answer": "meta.trut"}, "did you mean 'truth'")],
)
def test_a_missing_column_is_named_with_the_nearest_spelling(url, changes, message):
    with pytest.raises(DataError, match=message):
        open_source(source(url, **changes))


def test_a_dataset_with_a_reserved_column_name_is_refused():
    schema = pa.schema({"q": pa.string(), "a": pa.string(), "row_id": pa.int64()})
    with pytest.raises(DataError, match=r"'row_id'.*rename"):
        source_schema(schema, source("x", answer="a"))


def test_a_corrupt_file_is_named_when_it_is_read(tmp_path):
    for part in range(2):
        pq.write_table(
            pa.table({"q": [f"{part}-{i}" * 50 for i in range(99)], "a": ["x"] * 99}),
            tmp_path / f"{part}.parquet",
        )
    damaged = bytearray((tmp_path / "1.parquet").read_bytes())
    damaged[20:400] = bytes(380)
    (tmp_path / "1.parquet").write_bytes(damaged)
    loader = Dataloader(source(str(tmp_path), answer="a", batch_size=None, seed=None))
    with pytest.raises(DataError, match=r"1\.parquet"):
        loader.load(0, ("row_id", "prompt"), 0, 1)
    loader.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_later_steps_follow_the_prompts_that_were_drawn_beyond_a_step(url, workers):
    """No prompt is lost or repeated, also across the end of an epoch, whoever draws."""
    loaders = [Dataloader(source(url)) for _ in range(workers)]

    def everywhere(method, *arguments):
        parts = [
            getattr(loader, method)(*arguments, COLUMNS, index, workers)
            for index, loader in enumerate(loaders)
        ]
        return pa.concat_tables(parts).sort_by("row_id")

    taken = []
    for step in range(9):
        table = everywhere("load", step)
        taken += [
            table,
            *(
                [everywhere("draw_prompts", 3), everywhere("draw_prompts", 5)]
                if step in (2, 4)
                else []
            ),
        ]
        if step in (2, 4):
            assert [i for part in taken[-2:] for i in part["row_id"].to_pylist()] == list(
                range(8, 16)
            )
    for loader in loaders:
        loader.close()
    drawn = [i for table in taken for i in table["answer"].to_pylist()]
    assert sorted(drawn[:50]) == list(range(50))
    assert len(set(drawn[50:])) == len(drawn[50:])
    one = [load(url, step, 1)["answer"].to_pylist() for step in range(7)]
    assert drawn[:50] == [i for step in one for i in step]


def blobs(folder, *, groups=4, rows=64, size=2**15):
    """A dataset of row groups that are much larger than a step's rows."""
    schema = pa.schema({"q": pa.string(), "a": pa.string(), "blob": pa.binary()})
    with pq.ParquetWriter(
        folder / "blobs.parquet",
        schema,
        use_dictionary=False,
        compression="none",
        write_batch_size=16,
    ) as writer:
        for group in range(groups):
            numbers = range(group * rows, group * rows + rows)
            values = [bytes([i % 251]) * size for i in numbers]
            columns = {"q": [str(i) for i in numbers], "a": ["x"] * rows, "blob": values}
            writer.write_table(pa.table(columns, schema=schema), row_group_size=rows)
    return source(str(folder / "blobs.parquet"), answer="a", batch_size=4)


def test_a_loader_holds_a_few_steps_and_not_the_row_groups_they_come_from(tmp_path):
    """It held a whole row group for each prompt of a step."""
    group_bytes, keep = 1024 * 2**15, 2**19
    loader = Dataloader(replace(blobs(tmp_path, groups=3, rows=1024), keep=keep))
    first = pa.total_allocated_bytes()
    for step in range(8):
        table = loader.load(step, ("row_id", "prompt", "blob"), 0, 1)
        assert table.nbytes >= 4 * 2**15
        # the next step is being read meanwhile: a batch of 8 MiB, and what is read ahead of it
        assert pa.total_allocated_bytes() - first < group_bytes
    loader.close()


@pytest.mark.parametrize("keep", [0, 2**17, 2**19, 2**30])
def test_rows_are_the_same_however_much_is_held_ahead(tmp_path, keep):
    whole = Dataloader(blobs(tmp_path))
    loader = Dataloader(replace(blobs(tmp_path), keep=keep))
    for step in (0, 1, 2, 3, 40, 41, 63, 64, 65, 129):
        columns = ("row_id", "prompt", "blob")
        table = loader.load(step, columns, 0, 1)
        assert table.equals(whole.load(step, columns, 0, 1))
        assert table["blob"].to_pylist() == [
            bytes([int(q) % 251]) * 2**15 for q in table["prompt"].to_pylist()
        ]
    loader.close()
    whole.close()


def test_a_row_group_is_decoded_once_for_many_steps(tmp_path, monkeypatch):
    read, read_row_group = Counter(), Snapshot.read_row_group

    def counted(snapshot, group, *arguments, **options):
        read[group.index] += 1
        return read_row_group(snapshot, group, *arguments, **options)

    monkeypatch.setattr(Snapshot, "read_row_group", counted)
    loader = Dataloader(blobs(tmp_path))
    for step in range(60):
        loader.load(step, ("row_id", "prompt", "blob"), 0, 1)
    loader.close()
    assert sum(read.values()) < 20


def test_a_row_group_that_unpacks_to_more_than_the_limit_is_refused_by_file_size_and_key(tmp_path):
    rows = {
        "q": pa.nulls(2**20, pa.string()).fill_null(""),
        "a": pa.nulls(2**20, pa.string()).fill_null(""),
    }
    pq.write_table(pa.table(rows), tmp_path / "small.parquet", row_group_size=2**20)
    small = Source.of(
        DataConfig(url=str(tmp_path), prompt="q", answer="a", read_limit="1MiB"), batch_size=4
    )
    with pytest.raises(
        DataError, match=r"small\.parquet' has 1048576 rows.* 1048576 bytes .*data\.read_limit"
    ):
        open_source(small)
    loader = Dataloader(replace(blobs(tmp_path, size=2**17), read_limit=2**20))
    with pytest.raises(
        DataError, match=r"row group \d of .*blobs\.parquet takes .*1048576.*data\.read_limit"
    ):
        loader.load(0, ("row_id", "prompt", "blob"), 0, 1)
    loader.close()


def test_the_limit_of_what_is_read_at_once_is_that_of_moving_rows_where_none_is_given():
    assert Source.of(DataConfig(url="x", memory_limit="1GiB")).read_limit == 2**30
    assert (
        Source.of(DataConfig(url="x", memory_limit="1GiB", read_limit="3GiB")).read_limit
        == 3 * 2**30
    )
    with pytest.raises(ConfigError, match=r"data\.read_limit='9': expected at least 1MiB"):
        DataConfig(url="x", read_limit="9")


def test_dictionaries_and_views_are_decoded(tmp_path):
    words = pa.array(["a", "b", None, "a"]).dictionary_encode()
    views = pa.array(["x", None, "long enough to be out of line", ""], pa.string_view())
    nested = pa.StructArray.from_arrays(
        [words, pa.ListArray.from_arrays([0, 1, 2, 3, 4], words)], ["truth", "all"]
    )
    rows = pa.table(
        {
            "q": views,
            "meta": nested,
            "extra": words,
            "bytes": pa.array([b"1"] * 4, pa.binary_view()),
        }
    )
    pq.write_table(rows, tmp_path / "train.parquet", row_group_size=3)
    with pa.ipc.new_file(tmp_path / "train.arrow", rows.schema) as writer:
        writer.write_table(rows)
    for name in ("train.parquet", "train.arrow"):
        loader = Dataloader(source(str(tmp_path / name), batch_size=None, seed=None))
        table = loader.load(0, ("prompt", "answer", "extra", "meta", "bytes"), 0, 1)
        loader.close()
        assert table.schema.types[:3] == [pa.large_string()] * 3
        assert table["prompt"].to_pylist() == views.to_pylist()
        assert table["answer"].to_pylist() == table["extra"].to_pylist() == words.to_pylist()
        assert (
            table.select(["meta", "bytes"]).to_pylist()
            == rows.select(["meta", "bytes"]).to_pylist()
        )


WORDS = ["aa", "aa", None, "b"]
OFFSETS = pa.array([0, 1, 2, 3, 4], pa.int32())
RUNS = pc.run_end_encode(pa.array(WORDS))
LISTS = [["a"], None, [], ["b", "c"]]
OVERLAPPING = pa.ListViewArray.from_arrays(
    pa.array([2, 0, 3, 1], pa.int32()), pa.array([2, 3, 0, 1], pa.int32()), pa.array(list("wxyz"))
)
VIEW = pa.array(LISTS, pa.list_view(pa.string()))
LARGE_VIEW = pa.array(LISTS, pa.large_list_view(pa.string_view()))
NULLS = pa.array([True, False, False, True])
ENCODED = {
    "runs": RUNS,
    "runs of dictionary": pa.RunEndEncodedArray.from_arrays(
        pa.array([2, 4], pa.int32()), pa.array(["a", "b"]).dictionary_encode()
    ),
    "runs of lists": pa.RunEndEncodedArray.from_arrays(
        pa.array([2, 4], pa.int32()), pa.array([["a"], ["b"]])
    ),
    "list of runs": pa.ListArray.from_arrays(OFFSETS, RUNS),
    "map of runs": pa.MapArray.from_arrays(OFFSETS, pa.array(list("klmn")), RUNS),
    "list view": VIEW,
    "list view whose lists overlap": OVERLAPPING,
    "large list view of string views": LARGE_VIEW,
    "list view of list views": pa.array(
        [[["a"]], None, [], [["b", "c"], None]], pa.large_list_view(pa.list_view(pa.string()))
    ),
    "null structs": pa.StructArray.from_arrays([VIEW, LARGE_VIEW], ["x", "y"], mask=NULLS),
    "null structs of runs": pa.StructArray.from_arrays([RUNS, VIEW], ["x", "y"], mask=NULLS),
    "lists of structs": pa.array(
        [[{"a": ["x"]}], None, [], [{"a": None}, {"a": ["y", "z"]}]],
        pa.list_(pa.struct({"a": pa.list_view(pa.string())})),
    ),
    "lists of one length": pa.FixedSizeListArray.from_arrays(VIEW, 1),
    "map of list views": pa.MapArray.from_arrays(OFFSETS, pa.array(list("klmn")), VIEW),
}


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("file", ["train.parquet", "train.arrow"])
def test_runs_and_list_views_come_as_their_values(name, file, tmp_path):
    array = ENCODED[name]
    rows = pa.table({"q": list("0123"), "meta": [{"truth": "t"}] * 4, "x": array})
    if file == "train.arrow":
        with pa.ipc.new_file(tmp_path / file, rows.schema) as writer:
            writer.write_table(rows)
    else:
        try:
            pq.write_table(rows, tmp_path / file, row_group_size=3)
        except pa.ArrowNotImplementedError:
            pytest.skip("Parquet has no runs")
    values = array.to_pylist()
    for size in (None, 1, 3):
        given = source(str(tmp_path / file), batch_size=size, seed=None)
        loader = Dataloader(given)
        table = loader.load(0, ("prompt", "x"), 0, 1)
        loader.close()
        table.validate(full=True)
        assert table.schema.field("x").type == source_schema(rows.schema, given).field("x").type
        assert table["x"].to_pylist() == [values[int(row)] for row in table["prompt"].to_pylist()]


def test_a_dictionary_that_is_larger_once_it_is_decoded_keeps_to_the_limit(tmp_path):
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array(["x" * 2**16]))
    pq.write_table(pa.table({"q": words, "meta": [{"truth": 1}] * 64}), tmp_path / "train.parquet")
    loader = Dataloader(source(str(tmp_path / "train.parquet"), batch_size=None, read_limit=2**20))
    with pytest.raises(DataError, match=r"once decoded.*data.read_limit"):
        loader.load(0, ("prompt",), 0, 1)
    loader.close()


@pytest.mark.parametrize(
    "name", ["train.jsonl", "train.JSON", "train.csv.gz", "folder", "my rows.tsv"]
)
def test_json_and_csv_are_refused_with_the_command_that_makes_a_table(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text("{}")
    if name != "folder":
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"siirl-dask data import \S*") as refused:
        open_source(source(str(tmp_path / name)))
    assert name.partition(".")[0] in str(refused.value)
