from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest
from siirl_storage import (
    Conflict,
    CorruptPart,
    StorageError,
    join,
    open_fs,
    write_atomic,
    write_exclusive,
)
from siirl_storage.files import full_name, list_files, parent


@pytest.mark.parametrize(
    ("url", "joined"),
    [
        ("/a/b", "/a/b/x/y"),
        ("/a/b/", "/a/b/x/y"),
        ("/", "/x/y"),
        ("rel", "rel/x/y"),
        ("s3://bucket", "s3://bucket/x/y"),
        ("s3://bucket/", "s3://bucket/x/y"),
        ("memory://", "memory://x/y"),
        ("memory:///", "memory:///x/y"),
        ("simplecache::s3://b/k", "simplecache::s3://b/k/x/y"),
    ],
)
def test_join_neither_loses_nor_doubles_a_slash(url: str, joined: str) -> None:
    assert join(url, "x", "y") == joined
    assert join(url, "x/y") == joined


@pytest.mark.parametrize("folder", ["/a/b", "/", "s3://bucket/key", "memory://", "memory:///"])
def test_parent_undoes_join(folder: str) -> None:
    assert join(parent(join(folder, "file.parquet")), "file.parquet") == join(
        folder, "file.parquet"
    )


def test_unknown_protocol_gets_the_nearest_one() -> None:
    with pytest.raises(StorageError, match="did you mean memory://"):
        open_fs("memry://x")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "adlfs", None)
    with pytest.raises(StorageError, match="adlfs"):
        open_fs("abfs://container/x")


def test_exclusive_write_keeps_what_was_there(url: str) -> None:
    fs, path = open_fs(join(url, "file"))
    write_exclusive(fs, path, b"first")
    with pytest.raises(Conflict, match="file already exists"):
        write_exclusive(fs, path, b"second")
    assert fs.cat_file(path) == b"first"
    assert list(list_files(fs, open_fs(url)[1])) == ["file"], "a temporary file stayed"


def test_writes_take_a_memoryview(url: str) -> None:
    fs, path = open_fs(url)
    write_atomic(fs, f"{path}/a", memoryview(b"atomic"))
    write_exclusive(fs, f"{path}/b", memoryview(b"exclusive"))
    assert (fs.cat_file(f"{path}/a"), fs.cat_file(f"{path}/b")) == (b"atomic", b"exclusive")


def test_failed_local_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, path = open_fs(str(tmp_path / "file"))
    write_atomic(fs, path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (write_atomic, write_exclusive):
        with pytest.raises(
            OSError, match=r"the disk is full: .* bytes are free, and 3 were to be written"
        ):
            write(fs, path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_local_files_are_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        fs, path = open_fs(str(tmp_path / "file"))
        write_atomic(fs, path, b"data")
    finally:
        os.umask(old)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o644


def test_precondition_that_the_store_words_otherwise_is_still_a_conflict(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url.startswith("/"):
        pytest.skip("local files say FileExistsError")
    fs, path = open_fs(url)
    write_exclusive(fs, path, b"first")

    def refuse(path: str, data: bytes, mode: str = "overwrite") -> None:
        raise OSError(22, "At least one of the pre-conditions you specified did not hold")

    monkeypatch.setattr(fs, "pipe_file", refuse)
    with pytest.raises(Conflict, match="already exists"):
        write_exclusive(fs, path, b"second")
    with pytest.raises(OSError, match="pre-conditions"):
        write_exclusive(fs, f"{path}-new", b"second")


def test_names_in_messages_can_be_pasted() -> None:
    for name in ("/a/b", "memory:///a/b"):
        assert full_name(*open_fs(name)) == name


def test_corrupt_part_survives_a_trip_between_processes() -> None:
    assert ": short. Restore it" in str(CorruptPart("/a/part", "short."))
    error = pickle.loads(pickle.dumps(CorruptPart("/a/part", "short")))
    assert str(error) == str(CorruptPart("/a/part", "short"))
    assert error.path == "/a/part"


def test_a_device_or_a_pipe_gets_the_bytes_and_stays(tmp_path: Path) -> None:
    fs, _ = open_fs(str(tmp_path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(fs, str(pipe), b"whole")
        assert os.read(reader, 100) == b"whole"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    for link in ("device", "of a process"):
        place = tmp_path / link
        with (tmp_path / "target").open("wb") as target:
            number = target.fileno()
            name = f"/proc/self/fd/{number}"
            if link == "device":
                write_atomic(fs, name, b"by its name")
            else:
                place.symlink_to(name)
                write_atomic(fs, str(place), b"by its name")
                assert place.is_symlink()
        assert (tmp_path / "target").read_bytes() == b"by its name"


def test_a_link_to_a_file_is_replaced_and_its_file_stays(tmp_path: Path) -> None:
    fs, _ = open_fs(str(tmp_path))
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    write_atomic(fs, str(tmp_path / "link"), b"new")
    assert target.read_bytes() == b"mine"
    assert (tmp_path / "link").read_bytes() == b"new"
