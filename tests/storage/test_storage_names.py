"""A path is a path: no name, whatever is in it, leads an operation to what another name has."""

from __future__ import annotations

from uuid import uuid4

import pytest
from hypothesis import given, settings
from siirl_storage import (
    Conflict,
    StorageError,
    commit_parts,
    create_table,
    join,
    open_fs,
    open_table,
    read_record,
    remove_file,
    remove_tree,
    stage_part,
    write_atomic,
    write_exclusive,
)
from siirl_storage.conformance import sample
from siirl_storage.files import at, list_files, open_input

from tests.names import NEIGHBOURS

FILES = (
    "config.yaml",
    "checkpoints/step=000002-0001/COMMITTED",
    "checkpoints/step=000002-0001/policy/__0_0.distcp",
)


def contents(url: str) -> dict[str, bytes]:
    fs, root = open_fs(url)
    return {name: fs.cat_file(at(root, name)) for name in list_files(fs, root)}


def fill(url: str, rows: int) -> None:
    """Write what this package writes: files, a table and its snapshot, a folder of parts and its
    record.
    """
    fs, root = open_fs(url)
    for name in FILES:
        write_exclusive(fs, at(root, name), url.encode())
    create_table(join(url, "table"), [sample(rows, 5)])
    folder = join(url, "rollouts/step=000003")
    commit_parts(folder, 1, [stage_part(folder, 1, 0, sample(rows, 4))])


def check_filled(url: str, rows: int) -> None:
    fs, root = open_fs(url)
    for name in FILES:
        assert fs.exists(at(root, name))
        with open_input(fs, at(root, name)) as file:
            assert file.read() == url.encode()
    table = open_table(join(url, "table"))
    assert table.to_table().equals(sample(rows, 5))
    assert table.dataset().to_table().equals(sample(rows, 5))
    folder = join(url, "rollouts/step=000003")
    record = read_record(folder)
    assert record is not None
    assert [part.rows for part in record.parts] == [4]
    assert open_table(folder).to_table().equals(sample(rows, 4))


def check_apart(store: str, names: tuple[str, str]) -> None:
    """Write, read, replace and delete at each of two names, and look at the other one every
    time.
    """
    base = join(store, uuid4().hex)
    urls = [join(base, name) for name in names]
    for rows, url in enumerate(urls):
        fill(url, 10 * rows)
    for rows, url in enumerate(urls):
        check_filled(url, 10 * rows)
    fs, root = open_fs(base)
    assert sorted(
        str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)
    ) == sorted(names)
    before = [contents(url) for url in urls]
    for own, other in ((0, 1), (1, 0)):
        path = open_fs(urls[own])[1]
        with pytest.raises(Conflict):
            write_exclusive(fs, at(path, FILES[0]), b"mine")
        write_atomic(fs, at(path, FILES[0]), b"mine")
        remove_file(fs, at(path, FILES[1]))
        remove_tree(fs, at(path, "checkpoints"))
        left = {
            name: data for name, data in before[own].items() if not name.startswith("checkpoints/")
        }
        assert contents(urls[own]) == {**left, FILES[0]: b"mine"}
        assert contents(urls[other]) == before[other]
        remove_tree(fs, path)
        assert not fs.exists(path)
        assert contents(urls[other]) == before[other]
        before[own] = {}


EXAMPLES = {"local": 20, "memory": 50, "s3": 2}
"""An example takes a fortieth of a second in memory; a local one waits for the disk, one of S3
for 90 requests."""


@pytest.mark.parametrize("store_url", EXAMPLES, indirect=True)
def test_no_name_leads_to_the_files_of_another(
    store_url: str, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["store_url"]

    @settings(max_examples=EXAMPLES[kind])
    @given(names=NEIGHBOURS)
    def check(names: tuple[str, str]) -> None:
        check_apart(store_url, names)

    check_apart(store_url, ("exp[1]*?", "exp1XX"))
    check()


@pytest.mark.parametrize("name", ["exp::1", "exp::A", "a::b/c"])
def test_a_name_that_fsspec_would_cut_short_is_refused(store_url: str, name: str) -> None:
    with pytest.raises(StorageError, match="'::' for a chain"):
        open_fs(join(store_url, name))


def test_a_name_that_s3fs_would_cut_short_is_refused(s3: str) -> None:
    with pytest.raises(StorageError, match="versionId"):
        open_fs(join(s3, "exp?versionId=1/config.yaml"))


def test_a_chain_of_filesystems_still_opens(tmp_path) -> None:  # type: ignore[no-untyped-def]
    fs, path = open_fs(f"simplecache::file://{tmp_path}/a")
    write_atomic(*open_fs(str(tmp_path / "a")), b"data")
    assert fs.cat_file(path) == b"data"


def test_a_name_with_a_null_character_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="no name has the character of number 0"):
        open_fs(join(url, "a\0b"))
