from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from siirl_storage import (
    Conflict,
    Format,
    Part,
    RowGroup,
    StorageError,
    TableNotFound,
    append,
    commit,
    complete_parts,
    create_table,
    join,
    open_fs,
    open_table,
    parse_part_name,
    part_name,
    stage,
    write_part,
)
from siirl_storage.conformance import sample
from siirl_storage.files import list_files

RICH = pa.table(
    {
        "messages": pa.array(
            [[{"role": "user", "content": "2+2?"}], [], None],
            pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        ),
        "logprobs": pa.array([[-0.5, -1.25], [], None], pa.list_(pa.float32())),
        "half": pa.array([1.5, None, -2.0], pa.float16()),
        "nested": pa.array([[[1], []], None, [[2, 3]]], pa.large_list(pa.list_(pa.int32()))),
        "when": pa.array([0, 1, None], pa.timestamp("us", tz="UTC")),
        "blob": pa.array([b"\x00\xff", b"", None], pa.binary()),
        "nothing": pa.nulls(3),
    },
    metadata={"made by": "a test"},
)


@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("rows", [0, 3])
def test_schema_and_values_survive(url: str, kind: Format, rows: int) -> None:
    table = RICH.slice(0, rows)
    create_table(url, [table], format=kind)
    back = open_table(url).to_table()
    assert back.equals(table, check_metadata=True)
    assert [str(field) for field in back.schema] == [str(field) for field in table.schema], (
        "list item names changed"
    )
    write_part(join(url, "folder"), 0, 1, table, format=kind)
    assert open_table(join(url, "folder")).to_table().equals(table)


def test_random_numbers_take_no_more_bytes_than_in_memory(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=200_000).astype("f4")
    column = pa.LargeListArray.from_arrays(pa.array(np.arange(0, 200_001, 1000)), pa.array(numbers))
    nested = pa.StructArray.from_arrays([column], ["inner"])
    table = create_table(str(tmp_path / "t"), [pa.table({"plain": column, "nested": nested})])
    assert table.parts[0].nbytes < 1.01 * 2 * numbers.nbytes
    assert table.to_table()["nested"].combine_chunks().equals(nested)


@pytest.mark.parametrize("kind", Format)
def test_row_groups_have_the_size_asked_for_whatever_the_chunks(url: str, kind: Format) -> None:
    chunked = pa.concat_tables([sample(start, 7) for start in range(0, 35, 7)])
    snapshot = create_table(url, [chunked], rows_per_part=20, rows_per_group=8, format=kind)
    assert [part.groups for part in snapshot.parts] == [(8, 8, 4), (8, 7)]
    group = snapshot.row_groups()[3]
    assert group == RowGroup(snapshot.parts[1].path, 0, 8)
    assert snapshot.read_row_group(group, ["row"])["row"].to_pylist() == list(range(20, 28))


def test_a_row_group_is_read_without_the_others(tmp_path: Path) -> None:
    table = pa.table({"row": range(4000), "wide": [f"{row:0>500}" for row in range(4000)]})
    snapshot = create_table(str(tmp_path), [table], rows_per_group=1000)
    path = tmp_path / snapshot.parts[0].path
    data = bytearray(path.read_bytes())
    data[4:100] = bytes(96)  # breaks the first row group
    path.write_bytes(data)
    last = snapshot.row_groups()[-1]
    assert snapshot.read_row_group(last)["row"].to_pylist() == list(range(3000, 4000))


def test_old_versions_stay_readable(url: str) -> None:
    create_table(url, [sample(0, 3)], properties={"a": "1", "b": "1"})
    append(url, [sample(3, 3)], properties={"b": "2"})
    append(url, [])
    assert [open_table(url, version).num_rows for version in (1, 2, 3)] == [3, 6, 6]
    assert open_table(url, 1).properties == {"a": "1", "b": "1"}
    assert open_table(url).properties == {"a": "1", "b": "2"}


def test_version_after_999999_is_the_newest(url: str) -> None:
    create_table(url, [sample(0, 3)])
    fs, root = open_fs(url)
    text = fs.cat_file(f"{root}/_snapshots/000001.json").replace(
        b'"version": 1', b'"version": 999999'
    )
    fs.pipe_file(f"{root}/_snapshots/999999.json", text)
    assert append(url, [sample(3, 3)]).version == 1_000_000
    assert open_table(url).num_rows == 6


def test_a_relative_path_opens_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = create_table("here", [sample(0, 3)])
    plain = open_table(f"here/{made.parts[0].path}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for snapshot in (made, plain):
        assert open_table(snapshot.url, snapshot.version).to_table().equals(sample(0, 3))
        assert snapshot.to_table().equals(sample(0, 3))


def test_table_that_does_not_fit_is_refused_and_leaves_nothing(url: str) -> None:
    create_table(url, [sample(0, 3)])
    fs, root = open_fs(url)
    before = list_files(fs, root)
    other = pa.table({"row": ["0"], "text": ["a"], "more": [1]})
    with pytest.raises(StorageError) as caught:
        append(url, [sample(3, 9), other], rows_per_part=2)
    for words in ("table 1", "lacks column 'ids'", "a column 'more'", "'row' as string, not int64"):
        assert words in str(caught.value)
    assert list_files(fs, root) == before


def test_columns_in_another_order_or_without_values_fit(url: str) -> None:
    create_table(url, [sample(0, 3)])
    append(url, [sample(3, 3).select(["text", "ids", "row"])])
    append(
        url, [pa.table({"row": pa.array([6], pa.int64()), "ids": pa.nulls(1), "text": pa.nulls(1)})]
    )
    assert open_table(url).to_table()["row"].to_pylist() == list(range(7))


def test_second_creator_gets_a_conflict_and_leaves_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(url, [sample(0, 3)])
    fs, root = open_fs(url)
    before = list_files(fs, root)
    with pytest.raises(Conflict, match="already holds a table"):
        create_table(url, [sample(0, 3)])
    # it looks too early
    monkeypatch.setattr("siirl_storage.table.list_versions", lambda fs, root: [])
    with pytest.raises(Conflict, match=r"000001\.json already exists"):
        create_table(url, [sample(0, 3)])
    assert list_files(fs, root) == before


def test_commit_whose_reply_was_lost_is_not_done_twice(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from siirl_storage import files

    def lose_the_reply(create: Callable[..., None]) -> Callable[..., None]:
        def created_and_tried_again(*arguments: object) -> None:
            create(*arguments)
            raise FileExistsError("it is there, from the first try")

        return created_and_tried_again

    for create in ("_create", "_link"):  # on object stores and in memory; on local files
        monkeypatch.setattr(files, create, lose_the_reply(getattr(files, create)))
    assert create_table(url, [sample(0, 3)]).version == 1
    assert append(url, [sample(3, 3)]).version == 2
    assert open_table(url).to_table().equals(sample(0, 6))


def test_parts_staged_elsewhere_travel_as_json(url: str) -> None:
    part = stage(url, sample(0, 5), rows_per_group=2)
    sent = asdict(part) | {"groups": list(part.groups)}
    assert commit(url, [Part(**sent)]).parts == (part,)


@pytest.mark.parametrize(
    "path", ["/etc/passwd.parquet", "../x.parquet", "a/../../x.parquet", "a//x.parquet", ""]
)
def test_commit_refuses_parts_outside_the_table(url: str, path: str) -> None:
    with pytest.raises(StorageError, match="do not lie below"):
        commit(url, [Part(path, 0, (1,))])


def test_commit_refuses_a_part_that_does_not_fit_or_is_there_twice(url: str) -> None:
    part, other = stage(url, sample(0, 5)), stage(url, pa.table({"row": [1]}))
    with pytest.raises(StorageError, match="lacks column 'ids'"):
        commit(url, [part, other])
    with pytest.raises(StorageError, match="twice"):
        commit(url, [part, part])
    commit(url, [part])
    with pytest.raises(StorageError, match="already has"):
        commit(url, [part, stage(url, sample(5, 5))])
    with pytest.raises(StorageError, match="lacks column 'ids'"):
        commit(url, [other])


def test_type_that_the_format_would_change_is_refused(url: str) -> None:
    table = pa.table({"when": pa.array([1], pa.timestamp("s"))})
    with pytest.raises(StorageError, match=r"'when' as timestamp\[ms\].*another format"):
        create_table(url, [table])
    create_table(url, [table], format=Format.ARROW)
    assert open_table(url).to_table().equals(table)


def test_what_no_table_can_hold_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="more than one column is called 'a'"):
        create_table(url, [pa.table([[1], [2]], names=["a", "a"])])
    with pytest.raises(StorageError, match="without a schema"):
        create_table(url, [])
    with pytest.raises(StorageError, match="is not a string"):
        create_table(url, [sample(0, 1)], properties={"step": 1})  # type: ignore[dict-item]
    with pytest.raises(TableNotFound, match="create_table makes one"):
        append(url, [sample(0, 1)])


def test_unknown_column_and_row_group_name_what_there_is(url: str) -> None:
    snapshot = create_table(url, [sample(0, 3)])
    with pytest.raises(StorageError, match=r"\['idz'\].*row, ids, text"):
        snapshot.to_table(["idz"])
    with pytest.raises(StorageError, match="no row group 1"):
        snapshot.read_row_group(RowGroup(snapshot.parts[0].path, 1, 3))
    with pytest.raises(StorageError, match="no row group 0"):
        snapshot.read_row_group(RowGroup("data/other.parquet", 0, 3))


def test_part_names_round_trip_and_nothing_else_parses() -> None:
    assert part_name(2, 4) == "part-00002-of-00004.parquet"
    for name in (part_name(0, 1), part_name(123456, 1234567, Format.ARROW)):
        parsed = parse_part_name(name)
        assert parsed is not None
        assert part_name(*parsed) == name
    for name in (
        "part-00004-of-00004.parquet",
        "part-000002-of-00004.parquet",
        "part-2-of-4.parquet",
        "x.parquet",
    ):
        assert parse_part_name(name) is None
    with pytest.raises(ValueError, match=r"part index 4 is not in 0\.\.3"):
        part_name(4, 4)


def test_rewriting_a_part_replaces_it(url: str) -> None:
    write_part(url, 0, 1, sample(0, 5))
    write_part(url, 0, 1, sample(5, 2))
    assert complete_parts(url) == [part_name(0, 1)]
    assert open_table(url).to_table().equals(sample(5, 2))


def test_parts_that_disagree_are_not_complete(url: str) -> None:
    assert complete_parts(url) is None
    write_part(url, 0, 1, sample(0, 5))
    write_part(url, 1, 2, sample(0, 5))
    assert complete_parts(url) is None
    other = join(url, "formats")
    write_part(other, 0, 1, sample(0, 5))
    write_part(other, 0, 1, sample(0, 5), format=Format.ARROW)
    assert complete_parts(other) is None


def test_a_version_may_replace_the_rows_and_columns_of_those_before(tmp_path):
    url = str(tmp_path / "t")
    create_table(url, [pa.table({"a": [1, 2]})], properties={"of": "a"})
    append(url, [pa.table({"a": [3]})])
    other = pa.table({"b": ["x"]})
    replaced = commit(url, [stage(url, other)], properties={"of": "b"}, replace=True)
    assert (replaced.version, dict(replaced.properties)) == (3, {"of": "b"})
    assert open_table(url).to_table() == other
    assert open_table(url, version=2).to_table()["a"].to_pylist() == [1, 2, 3]
    assert append(url, [other]).to_table()["b"].to_pylist() == ["x", "x"]
    first = commit(str(tmp_path / "new"), [stage(str(tmp_path / "new"), other)], replace=True)
    assert first.version == 1
