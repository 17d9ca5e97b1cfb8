"""Conformance suite of a store: functions of an empty URL that raise AssertionError if tables would
not be safe.

python -m siirl_storage.conformance s3://bucket/scratch

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_my_store(check): check(f"mystore://bucket/{uuid4().hex}")
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar
from uuid import uuid4

import pyarrow as pa
from fsspec.core import url_to_fs

from siirl_storage.committed import commit_parts, complete_parts, stage_part
from siirl_storage.errors import Conflict, CorruptPart, StorageError, TableNotFound
from siirl_storage.files import (
    at,
    join,
    list_files,
    open_fs,
    open_input,
    write_atomic,
    write_exclusive,
)
from siirl_storage.formats import Format
from siirl_storage.parts import part_name, write_part
from siirl_storage.table import append, commit, create_table, open_table, stage

_WRITERS = 8
Result = TypeVar("Result")
_SCHEMA = pa.schema({"row": pa.int64(), "ids": pa.list_(pa.int32()), "text": pa.string()})


def sample(start: int, rows: int) -> pa.Table:
    """Return rows ``start`` to ``start + rows`` of a ragged table with empty lists and nulls."""
    numbers = range(start, start + rows)
    ids: list[list[int] | None] = []
    texts: list[str | None] = []
    for row in numbers:
        ids.append(None if row % 7 == 6 else list(range(row % 5)))
        texts.append(None if row % 3 == 2 else f"row {row}")
    return pa.table({"row": numbers, "ids": ids, "text": texts}, schema=_SCHEMA)


def atomic_write_replaces_the_whole_file(url: str) -> None:
    fs, path = open_fs(join(url, "file"))
    for data in (b"the first, longer text", b"second", b""):
        write_atomic(fs, path, data)
        assert fs.cat_file(path) == data


def readers_never_see_half_of_an_atomic_write(url: str) -> None:
    fs, path = open_fs(join(url, "file"))
    versions = [bytes([digit]) * 200_000 for digit in range(4)]
    write_atomic(fs, path, versions[0])

    def work(index: int) -> None:
        for _ in range(5):
            if index % 2:
                write_atomic(fs, path, versions[index // 2])
            else:
                assert fs.cat_file(path) in versions, "a reader saw a file that nobody wrote"

    _together(work)


def what_others_write_is_seen_after_a_listing(url: str) -> None:
    fs, root = open_fs(url)
    write_atomic(fs, at(root, "first"), b"first")
    assert list(list_files(fs, root)) == ["first"]
    other, _ = url_to_fs(url, skip_instance_cache=True)
    other.pipe_file(at(root, "second"), b"second")
    assert fs.cat_file(at(root, "second")) == b"second"
    with open_input(fs, at(root, "second")) as file:
        assert file.read() == b"second"
    assert sorted(list_files(fs, root)) == ["first", "second"]


def exclusive_write_has_one_winner(url: str) -> None:
    fs, path = open_fs(join(url, "file"))

    def work(index: int) -> int | None:
        try:
            write_exclusive(fs, path, str(index).encode())
        except Conflict:
            return None
        return index

    winners = [index for index in _together(work) if index is not None]
    assert len(winners) == 1, f"{len(winners)} writers believe that they created one file"
    assert fs.cat_file(path) == str(winners[0]).encode(), "the winner's data is not what was stored"


def table_has_one_creator(url: str) -> None:
    def work(index: int) -> int | None:
        try:
            create_table(url, [sample(index, 5)])
        except Conflict:
            return None
        return index

    winners = [index for index in _together(work) if index is not None]
    assert len(winners) == 1, f"{len(winners)} writers believe that they created one table"
    assert open_table(url).to_table().equals(sample(winners[0], 5))


def concurrent_appends_lose_no_row(url: str) -> None:
    create_table(url, [], schema=_SCHEMA)
    _together(lambda index: append(url, [sample(10 * index, 10)]))
    snapshot = open_table(url)
    assert snapshot.version == _WRITERS + 1
    assert sorted(snapshot.to_table()["row"].to_pylist()) == list(range(10 * _WRITERS))


def tables_come_back_as_they_were(url: str) -> None:
    for kind in Format:
        place = join(url, kind)
        made = create_table(
            place, [sample(0, 40), sample(40, 0), sample(40, 60)], format=kind, rows_per_part=30
        )
        opened = open_table(place)
        assert opened == made
        assert [part.rows for part in opened.parts] == [30, 30, 30, 10]
        assert opened.to_table().equals(sample(0, 100))
        assert opened.dataset().to_table().equals(sample(0, 100))
        again = [opened.read_row_group(group, ["text", "row"]) for group in opened.row_groups()]
        assert pa.concat_tables(again).equals(sample(0, 100).select(["text", "row"]))


def empty_tables_keep_their_schema(url: str) -> None:
    create_table(url, [sample(0, 0)], properties={"made": "empty"})
    snapshot = open_table(url)
    assert snapshot.to_table().equals(sample(0, 0))
    assert (snapshot.row_groups(), snapshot.properties) == ((), {"made": "empty"})
    part = write_part(join(url, "step=1"), 0, 1, sample(0, 0))
    assert part.rows == 0
    assert open_table(join(url, "step=1")).to_table().equals(sample(0, 0))


def staged_parts_are_unseen_until_committed(url: str) -> None:
    parts = [stage(url, sample(10 * index, 10)) for index in range(3)]
    _raises(TableNotFound, lambda: open_table(url))
    commit(url, parts[:2])
    assert commit(url, parts[:2]).version == 1, (
        "committing the same parts again made a second version"
    )
    assert open_table(url).num_rows == 20
    commit(url, parts[2:])
    assert open_table(url).to_table().equals(sample(0, 30))
    assert open_table(url, 1).to_table().equals(sample(0, 20)), "version 1 changed"


def a_folder_is_complete_with_its_last_part(url: str) -> None:
    for index in (2, 0, 1):
        assert complete_parts(url) is None
        write_part(url, index, 3, sample(10 * index, 10))
    write_part(url, 1, 3, sample(10, 10))
    assert complete_parts(url) == [part_name(index, 3) for index in range(3)]
    assert open_table(url).to_table().equals(sample(0, 30))


def the_newest_writer_of_a_folder_counts(url: str) -> None:
    old = [stage_part(url, 3, index, sample(10 * index, 10)) for index in range(2)]
    _raises(TableNotFound, lambda: open_table(url))
    commit_parts(url, 3, old)
    commit_parts(url, 3, old)
    _raises(Conflict, lambda: commit_parts(url, 3, old[:1]))
    assert open_table(url).num_rows == 20
    new = stage_part(url, 4, 0, sample(70, 5))
    assert complete_parts(url) == [part.path for part in old], "a part without a record counts"
    commit_parts(url, 4, [new])
    stage_part(url, 3, 2, sample(0, 1))
    assert complete_parts(url) == [new.path]
    assert open_table(url).to_table().equals(sample(70, 5))


def damage_is_named(url: str) -> None:
    part = create_table(url, [sample(0, 10)]).parts[0]
    fs, root = open_fs(url)
    path = at(root, part.path)
    write_atomic(fs, path, fs.cat_file(path)[:-7])
    assert part.path in str(_raises(CorruptPart, lambda: open_table(url).to_table()))
    fs.rm_file(path)
    assert part.path in str(_raises(CorruptPart, lambda: open_table(url).to_table()))


def what_is_missing_is_named(url: str) -> None:
    _raises(TableNotFound, lambda: open_table(url))
    create_table(url, [sample(0, 1)])
    assert "versions there: 1" in str(_raises(TableNotFound, lambda: open_table(url, 2)))


CHECKS: tuple[Callable[[str], None], ...] = (
    atomic_write_replaces_the_whole_file,
    readers_never_see_half_of_an_atomic_write,
    what_others_write_is_seen_after_a_listing,
    exclusive_write_has_one_winner,
    table_has_one_creator,
    concurrent_appends_lose_no_row,
    tables_come_back_as_they_were,
    empty_tables_keep_their_schema,
    staged_parts_are_unseen_until_committed,
    a_folder_is_complete_with_its_last_part,
    the_newest_writer_of_a_folder_counts,
    damage_is_named,
    what_is_missing_is_named,
)
"""The checks. Each takes a URL at which nothing is yet, and leaves its files there."""


def _together(work: Callable[[int], Result]) -> list[Result]:
    """Run ``work(index)`` in as many threads as there are writers, all starting at once."""
    barrier = Barrier(_WRITERS)

    def start(index: int) -> Result:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(_WRITERS) as pool:
        return list(pool.map(start, range(_WRITERS)))


def _raises(kind: type[StorageError], call: Callable[[], object]) -> StorageError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def main(url: str) -> None:
    for check in CHECKS:
        check(join(url, f"conformance-{uuid4().hex}"))
        print(f"ok  {check.__name__}")


if __name__ == "__main__":
    main(sys.argv[1])
