"""Bytes that are not what was written end in an error that names the file, never in another
exception or other rows.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from siirl_storage import (
    CorruptPart,
    Format,
    Part,
    StorageError,
    create_table,
    join,
    open_fs,
    open_table,
    write_part,
)
from siirl_storage.conformance import sample
from siirl_storage.files import at
from siirl_storage.formats import read_footer
from siirl_storage.manifest import Manifest, is_below, parse_manifest

QUICK = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
TYPES = st.sampled_from(
    [pa.int64(), pa.string(), pa.list_(pa.float32()), pa.struct({"a": pa.int8()}), pa.null()]
)
PARTS = st.builds(
    Part,
    path=st.text(min_size=1).filter(is_below),
    nbytes=st.integers(min_value=0),
    groups=st.lists(st.integers(min_value=0), max_size=4).map(tuple),
)
MANIFESTS = st.builds(
    Manifest,
    version=st.integers(min_value=1),
    commit=st.text(),
    schema=st.dictionaries(st.text(), TYPES, min_size=1, max_size=4).map(pa.schema),
    parts=st.lists(PARTS, max_size=4, unique_by=lambda part: part.path).map(tuple),
    properties=st.dictionaries(st.text(), st.text(), max_size=3),
)
ONE = Manifest(1, "token", sample(0, 0).schema, (Part("data/a.parquet", 10, (3, 2)),), {"k": "v"})


@QUICK
@given(MANIFESTS)
def test_manifest_round_trips(manifest: Manifest) -> None:
    assert parse_manifest(manifest.to_json(), manifest.version, "here") == manifest


@QUICK
@given(st.data())
def test_mutated_manifest_bytes_raise_nothing_but_storage_errors(data: st.DataObject) -> None:
    text = bytearray(ONE.to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=4))
    survives(bytes(text))


@QUICK
@given(st.data())
def test_mutated_manifest_values_raise_nothing_but_storage_errors(data: st.DataObject) -> None:
    document = json.loads(ONE.to_json())
    target = data.draw(st.sampled_from([document, document["parts"][0], document["properties"]]))
    key = data.draw(st.sampled_from([*target, "new"]))
    if data.draw(st.booleans()):
        target.pop(key, None)
    else:
        target[key] = data.draw(JSON)
    survives(json.dumps(document).encode())


@QUICK
@given(st.data())
def test_mutated_schema_bytes_raise_nothing_but_storage_errors(data: st.DataObject) -> None:
    raw = bytearray(ONE.schema.serialize())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    document = json.loads(ONE.to_json()) | {"schema": base64.b64encode(raw).decode()}
    survives(json.dumps(document).encode())


def survives(text: bytes) -> None:
    try:
        parse_manifest(text, 1, "here").to_json()
        message = "usable, here"
    except StorageError as error:
        message = str(error)
    assert "here" in message


def test_deeply_nested_manifest_is_refused() -> None:
    with pytest.raises(StorageError, match="here is not a usable snapshot manifest"):
        parse_manifest(b"[" * 100_000, 1, "here")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("path", "/etc/passwd", "does not lie below"),
        ("path", "../other/data/a.parquet", "does not lie below"),
        ("path", "data/../../a.parquet", "does not lie below"),
        ("path", "s3://bucket/a.parquet", "does not lie below"),
        ("path", "data\\..\\a.parquet", "does not lie below"),
        ("path", "data/\x00.parquet", "does not lie below"),
        ("path", None, '"path" is missing'),
        ("groups", [True], "not counts of rows"),
        ("groups", [-1], "not counts of rows"),
        ("bytes", "many", '"bytes" is missing or not a natural'),
    ],
)
def test_unsafe_manifest_is_refused_when_opened(
    url: str, key: str, value: object, words: str
) -> None:
    create_table(url, [sample(0, 5)])
    rewrite_part(url, **{key: value})
    with pytest.raises(StorageError, match=words) as caught:
        open_table(url)
    assert "_snapshots/000001.json" in str(caught.value)


def rewrite_part(url: str, **changes: Any) -> None:
    fs, root = open_fs(url)
    path = f"{root}/_snapshots/000001.json"
    document = json.loads(fs.cat_file(path))
    document["parts"][0] |= changes
    fs.pipe_file(path, json.dumps(document).encode())


@pytest.mark.parametrize("groups", [[4], [5, 1], [], [2, 3]])
def test_manifest_with_other_row_counts_than_the_footer_is_noticed(
    url: str, groups: list[int]
) -> None:
    part = create_table(url, [sample(0, 5)]).parts[0]
    rewrite_part(url, groups=groups)
    snapshot = open_table(url)
    if not groups:  # nothing is read of a part that is said to be empty
        assert snapshot.num_rows == 0
        return
    with pytest.raises(
        CorruptPart, match=f"{part.path}.*has 5 rows in 1 row groups, and should have"
    ):
        snapshot.read_row_group(snapshot.row_groups()[0])
    with pytest.raises(CorruptPart, match=part.path):
        snapshot.to_table()


def test_part_with_another_schema_than_the_manifest_is_noticed(url: str) -> None:
    part = create_table(url, [sample(0, 5)]).parts[0]
    fs, root = open_fs(url)
    write_part(url, 0, 1, pa.table({"row": ["a"] * 5}))
    fs.pipe_file(at(root, part.path), fs.cat_file(f"{root}/part-00000-of-00001.parquet"))
    with pytest.raises(
        CorruptPart, match=f"{part.path}.*lacks column 'ids'.*'row' as string, not int64"
    ):
        open_table(url).to_table()


@pytest.mark.parametrize("kind", Format)
def test_damaged_plain_file_is_named_with_its_full_path(url: str, kind: Format) -> None:
    write_part(url, 0, 2, sample(0, 5), format=kind)
    part = write_part(url, 1, 2, sample(5, 5), format=kind)
    fs, root = open_fs(url)
    path = at(root, part.path)
    good = fs.cat_file(path)
    for bad in (b"", b"PAR1", good[:-1], good[len(good) // 2 :], b"x" * 500):
        fs.pipe_file(path, bad)
        with pytest.raises(CorruptPart, match="Restore it from a copy, or delete it") as caught:
            open_table(url).to_table()
        assert caught.value.path == (
            path if url.startswith("/") else f"{url.partition(':')[0]}://{path}"
        )


def test_flipped_bit_in_a_parquet_page_is_noticed() -> None:
    url = "memory://damage/flipped"
    part = create_table(url, [sample(0, 5)]).parts[0]
    fs, root = open_fs(url)
    path = at(root, part.path)
    good = fs.cat_file(path)
    end = len(good) - int.from_bytes(good[-8:-4], "little") - 8
    noticed = 0
    for place in range(4, end):
        bad = bytearray(good)
        bad[place] ^= 1
        fs.pipe_file(path, bytes(bad))
        try:
            assert open_table(url).to_table().equals(sample(0, 5))  # a bit of a page's statistics
        except CorruptPart:
            noticed += 1
    assert noticed > 0.7 * (end - 4)


@pytest.mark.parametrize("kind", Format)
def test_random_damage_raises_nothing_but_corrupt_part(kind: Format) -> None:
    rng, refused = random.Random(7), set()
    url = f"memory://damage/{kind}"
    part = write_part(url, 0, 1, sample(0, 50), format=kind, rows_per_group=20)
    snapshot = open_table(url)
    fs, root = open_fs(url)
    path = at(root, part.path)
    good = fs.cat_file(path)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 2, 5])):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        fs.pipe_file(path, bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])]))
        for read in (snapshot.to_table, lambda: open_table(url).to_table()):
            try:
                read().validate(full=True)
            except CorruptPart:
                continue
            except StorageError as error:
                refused.add(str(error))
    assert all("more than one column" in text for text in refused), (
        "more than a flipped bit in a name was refused"
    )


def test_errors_of_the_store_are_not_taken_for_damage(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write_part(url, 0, 1, sample(0, 5))
    fs, root = open_fs(url)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("siirl_storage.formats.open_input", refuse)
    with pytest.raises(PermissionError):
        read_footer(fs, at(root, part.path))


def test_missing_part_of_a_snapshot_is_named(url: str) -> None:
    part = create_table(url, [sample(0, 5)]).parts[0]
    fs, root = open_fs(url)
    fs.rm_file(at(root, part.path))
    with pytest.raises(
        CorruptPart,
        match=f"{join(url, part.path).rpartition('//')[2]} cannot be read: it is not there",
    ):
        open_table(url).to_table()
