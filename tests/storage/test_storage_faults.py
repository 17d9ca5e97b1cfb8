"""Operations on a store that fails now and then: each is repeated, and none is done twice."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import duckdb
import pyarrow as pa
import pytest
import s3fs
from siirl_storage import (
    Conflict,
    join,
    open_fs,
    remove_tree,
    retries_end_at,
    retry,
    set_retry_seconds,
    write_atomic,
    write_exclusive,
    write_part,
)
from siirl_storage.files import list_files

from tests.clusters import lasting_port
from tests.storage.s3_proxy import ANSWERS, LOST, RESET, Proxy, proxied

PASSING = [*ANSWERS, LOST, RESET]


@pytest.fixture(scope="module")
def proxy_of_all(s3: str) -> Iterator[Proxy]:
    """S3 through a proxy. botocore and s3fs try only once, so that what is tested are the
    repetitions of this package; the test of a lost answer has them as they are by default.
    """
    with proxied(os.environ["AWS_ENDPOINT_URL"]) as proxy, pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", proxy.url)
        patched.setenv("AWS_MAX_ATTEMPTS", "1")
        patched.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def proxy(proxy_of_all: Proxy) -> Iterator[Proxy]:
    """A proxy that lets everything pass until the test says otherwise."""
    proxy_of_all.seen.clear()
    yield proxy_of_all
    proxy_of_all.times = 0


@pytest.fixture
def place(proxy: Proxy, s3: str) -> str:
    return f"{s3}/{uuid4().hex}"


@pytest.mark.parametrize("how", PASSING)
def test_the_creator_of_a_file_knows_that_it_is_even_after_failures(
    proxy: Proxy, place: str, how: str
) -> None:
    fs, path = open_fs(join(place, "file"))
    proxy.fail(how, "PUT", "file", times=2)
    write_exclusive(fs, path, b"mine")
    assert not proxy.times
    assert fs.cat_file(path) == b"mine"
    with pytest.raises(Conflict):
        write_exclusive(fs, path, b"another's")
    assert fs.cat_file(path) == b"mine"


def test_a_reply_that_is_lost_below_is_no_conflict(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # botocore repeats the PUT itself, and is told that the file exists
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    s3fs.S3FileSystem.clear_instance_cache()
    fs, path = open_fs(join(place, "file"))
    proxy.fail(LOST, "PUT", "file")
    write_exclusive(fs, path, b"mine")
    s3fs.S3FileSystem.clear_instance_cache()
    assert [seen.startswith("PUT") for seen in proxy.seen if "file" in seen].count(True) == 2


@pytest.mark.parametrize("how", PASSING)
@pytest.mark.parametrize("operation", ["write", "read", "stream", "list", "look", "remove"])
def test_no_operation_fails_by_an_error_that_passes(
    proxy: Proxy, place: str, operation: str, how: str
) -> None:
    fs, root = open_fs(place)
    write_atomic(fs, f"{root}/a", b"old")
    write_atomic(fs, f"{root}/b", b"b")
    match operation:
        case "write":
            proxy.fail(how, "PUT", "/a", times=2)
            write_atomic(fs, f"{root}/a", b"new")
            assert fs.cat_file(f"{root}/a") == b"new"
        case "read":
            proxy.fail(how, "GET", "/a", times=2)
            assert fs.cat_file(f"{root}/a") == b"old"
        case "stream":
            with fs.open(f"{root}/a", "rb") as file:
                proxy.fail(how, "GET", "/a", times=2)
                file.seek(1)
                assert file.read() == b"ld"
        case "list":
            proxy.fail(how, "GET", "list-type=2", times=2)
            assert list_files(fs, root) == {"a": 3, "b": 1}
        case "look":
            proxy.fail(how, "HEAD", "/a", times=2)
            assert fs.exists(f"{root}/a"), "a failure was taken for an absence"
        case "remove":
            proxy.fail(how, "POST", "delete")
            remove_tree(fs, root)
            assert list_files(fs, root) == {}
    assert not proxy.times, "the failures were not met"


def test_a_gateway_that_is_away_for_a_second_costs_nothing(
    place: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, path = open_fs(join(place, "file"))
    write_atomic(fs, path, b"here")
    port = lasting_port()
    with proxied(proxy.upstream, port) as gateway:
        pass
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    s3fs.S3FileSystem.clear_instance_cache()
    fs, path = open_fs(join(place, "file"))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fs.cat_file, path)
        with pytest.raises(TimeoutError):
            reading.result(timeout=1)
        with proxied(proxy.upstream, port):
            assert reading.result(timeout=60) == b"here"
    s3fs.S3FileSystem.clear_instance_cache()


def test_what_does_not_pass_is_raised_when_the_time_is_over_and_says_how_often_it_was_tried(
    proxy: Proxy, place: str
) -> None:
    fs, path = open_fs(join(place, "file"))
    write_atomic(fs, path, b"here")
    set_retry_seconds(0.5)
    try:
        proxy.fail("slow down", "GET", "file", times=100)
        with pytest.raises(OSError, match="injected") as caught:
            fs.cat_file(path)
        proxy.fail("slow down", "HEAD", "file", times=100)
        with pytest.raises(OSError, match=r"Service Unavailable|503"):
            fs.exists(path)
    finally:
        set_retry_seconds(120)
    assert "times in" in caught.value.__notes__[0]
    assert "storage.retry_seconds=0.5" in caught.value.__notes__[0]


def test_what_nobody_waits_for_any_more_is_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[float] = []

    def fails() -> None:
        tries.append(time.monotonic())
        raise ConnectionResetError("gone")

    deadline = time.monotonic() + 1.0
    with (
        retries_end_at(deadline),
        retries_end_at(deadline + 60),
        pytest.raises(ConnectionResetError) as caught,
    ):
        retry(fails)
    assert len(tries) > 1
    assert tries[-1] < deadline
    said = [record for record in caplog.records if record.name.startswith("siirl_storage")]
    assert len(said) == len(tries) - 1, "each repetition is said, and no more"
    assert "as long as anybody waited" in caught.value.__notes__[0]


def test_duckdb_reads_what_open_fs_gives(proxy: Proxy, place: str) -> None:
    for step in (1, 2):
        write_part(join(place, f"step={step}"), 0, 1, pa.table({"row": [step, step]}))
    fs, path = open_fs(place)
    proxy.fail("slow down", "GET", "part", times=2)
    with duckdb.connect() as connection:
        connection.register_filesystem(fs)
        query = f"SELECT sum(row) FROM read_parquet('{fs.unstrip_protocol(path)}/step=*/*.parquet')"
        assert connection.sql(query).fetchall() == [(6,)]
    assert not proxy.times


def test_a_tree_that_is_absent_is_removed_at_once(url: str) -> None:
    fs, root = open_fs(url)
    remove_tree(fs, root)
    write_atomic(fs, f"{root}/a/b", b"")
    remove_tree(fs, root)
    assert not fs.exists(root)
