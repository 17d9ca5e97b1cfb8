"""One start of a run at a time: who lives is not disturbed, who is dead is taken over and writes
no more.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs, remove_tree, write_atomic

from siirl_dask.errors import ConfigError, Fenced, FolderGone, RunInProgress
from siirl_dask.runs.attempt import newest_start, summary_is_older, take
from siirl_dask.runs.owner import Owner, is_same

HOLD = """
import sys, time
from siirl_dask.runs.attempt import newest_start, take
with take(sys.argv[1], float(sys.argv[2]), print) as attempt:
    print(attempt.number, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def url(store_url):
    return store_url


@pytest.fixture
def hold():
    """Start a process that has a folder, until its standard input is closed."""
    started = []

    def begin(url, lease):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, url, str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline().strip().isdigit()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def of_another_host(url, lease=1.0, **changes):
    """An attempt of a host that is not this one, as far as its file says."""
    fs, path = open_fs(f"{url}/attempts/0001.json")
    owner = replace(Owner.here(lease), host="elsewhere", machine="another boot", **changes)
    write_atomic(fs, path, owner.to_json())


def test_a_second_start_is_refused_while_the_first_lives_and_names_it(tmp_path, hold, slowdown):
    first = hold(str(tmp_path), 1.5)
    began = time.monotonic()
    with pytest.raises(
        RunInProgress,
        match=rf"is being trained, by process {first.pid} of \S+ on \S+, since 2\d\d\d-",
    ):
        take(str(tmp_path), 30.0, print)
    seconds = time.monotonic() - began
    assert seconds < 1.5 * slowdown.factor, "it waited for longer than the first one's lease"


def test_a_process_that_is_gone_is_followed_at_once(tmp_path, hold):
    first = hold(str(tmp_path), 3600.0)
    first.kill()
    first.wait()
    waits = []
    assert take(str(tmp_path), 30.0, waits.append).number == 2
    assert waits == []


def test_a_zombie_is_gone(tmp_path, hold):
    first = hold(str(tmp_path), 3600.0)
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert take(str(tmp_path), 30.0, print).number == 2


def test_a_later_process_of_the_same_number_is_not_taken_for_it(tmp_path):
    fs, path = open_fs(f"{tmp_path}/attempts/0001.json")
    write_atomic(fs, path, replace(Owner.here(3600.0), birth="1").to_json())
    assert take(str(tmp_path), 30.0, print).number == 2


@pytest.mark.parametrize(
    ("birth", "now", "expected"),
    [
        ("7", "7", True),
        ("7", "8", False),
        ("7", None, False),
        ("", None, False),
        ("7", "", None),
        ("", "7", None),
        ("", "", None),
    ],
)
def test_a_process_that_the_system_hides_counts_neither_as_gone_nor_as_there(birth, now, expected):
    """With it for gone, a second run would write where another user's is training."""
    assert is_same(birth, now) is expected


@pytest.mark.parametrize("changes", [{"machine": ""}, {"machine": "another boot"}])
def test_nothing_is_certain_of_a_process_of_another_system(changes):
    here = Owner.here(1.0)
    assert here.is_there()
    assert not here.is_gone()
    elsewhere = replace(here, **changes)
    assert not elsewhere.is_there()
    assert not elsewhere.is_gone()


def test_a_clean_end_frees_the_folder_at_once(url):
    fs, path = open_fs(url)
    with take(url, 3600.0, print) as first:
        first.check()
        write_atomic(fs, f"{path}/config.yaml", b"")
    waits = []
    assert take(url, 30.0, waits.append).number == 2
    assert waits == []


def test_a_summary_of_an_earlier_start_is_told_from_that_of_the_newest(tmp_path):
    url = str(tmp_path / "run")
    with take(url, 30.0, print):
        write_atomic(*open_fs(f"{url}/summary.json"), b"{}")
        assert not summary_is_older(url)
    os.utime(tmp_path / "run" / "summary.json", (1e9, 1e9))
    with take(url, 30.0, print):
        assert summary_is_older(url)


def test_a_start_that_wrote_nothing_leaves_nothing(url):
    with take(url, 3600.0, print) as first:
        assert first.number == 1
    fs, path = open_fs(url)
    fs.invalidate_cache()
    assert not fs.exists(path)
    with take(url, 3600.0, print) as again:
        assert again.number == 1


def test_a_silent_one_of_another_host_is_followed_after_its_own_lease(url, slowdown):
    of_another_host(url, lease=1.0)
    waits, began = [], time.monotonic()
    assert take(url, 3600.0, waits.append).number == 2
    assert 1.0 <= time.monotonic() - began < 5.0 * slowdown.factor
    assert "for up to 1 s for a sign of life of process" in waits[0]
    assert "on elsewhere" in waits[0]


def test_a_stopped_process_is_followed_and_fenced_when_it_wakes(tmp_path, hold):
    first = hold(str(tmp_path), 1.0)
    os.kill(first.pid, signal.SIGSTOP)
    with take(str(tmp_path), 30.0, print) as second:
        assert second.number == 2
        os.kill(first.pid, signal.SIGCONT)
        first.stdin.close()
        assert first.wait(60) == 0
        second.check()  # what the first one wrote when it ended has not disturbed it


def test_who_was_followed_is_told_by_whom(url):
    of_another_host(url, lease=0.2)
    first = take(url, 0.2, print)
    first.check()
    second = take(url, 0.2, print)
    with pytest.raises(
        Fenced,
        match=rf"taken over by process {os.getpid()} of .*attempt 2, gave no sign of life for 0\.2 s",
    ):
        first.check()
    assert (first.holds(), second.holds()) == (False, True)


def test_of_many_starts_at_once_one_has_the_folder(url):
    """None of them lives long enough for its beat, so that each that is refused has seen another
    one's number.
    """
    of_another_host(url, lease=0.5)
    taken, refused = [], []

    def start():
        try:
            attempt = take(url, 2.0, lambda text: None).__enter__()
        except RunInProgress:
            refused.append(1)
        else:
            taken.append(attempt)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for attempt in taken:
        attempt.__exit__(None, None, None)
    assert (len(taken), len(refused), taken[0].number) == (1, 5, 2)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"pid": "x"}', json.dumps({"lease": -1})])
def test_a_file_that_says_nothing_is_named(url, text):
    of_another_host(url)
    fs, path = open_fs(f"{url}/attempts/0001.json")
    fields = json.loads(fs.cat_file(path))
    write_atomic(
        fs,
        path,
        text.encode()
        if not text.startswith('{"')
        else json.dumps(fields | json.loads(text)).encode(),
    )
    with pytest.raises(
        ConfigError,
        match=r"attempts/0001\.json does not say who trains this run: .*remove the file",
    ):
        take(url, 30.0, print)


def test_a_start_that_begins_again_writes_under_a_new_number_and_keeps_the_folder(url):
    with take(url, 2.0, print) as attempt:
        first = attempt.number
        attempt.begin_again()
        assert attempt.number == first + 1
        attempt.check()
        with pytest.raises(RunInProgress):
            take(url, 0.5, print)
    assert take(url, 30.0, print).number == first + 2


def test_a_start_that_was_taken_over_does_not_begin_again(url):
    attempt = take(url, 30.0, print)
    fs, path = open_fs(f"{url}/attempts/0002.json")
    write_atomic(fs, path, Owner.here(30.0).to_json())
    with pytest.raises(Fenced):
        attempt.begin_again()
    assert attempt.number == 1


def test_a_start_whose_folder_was_removed_is_fenced_and_writes_no_sign_of_life_there(url):
    # a sign of life every half second: the removal goes round again where one comes meanwhile
    with take(url, 3.0, print) as attempt:
        attempt.check()
        remove_tree(*open_fs(url))
        with pytest.raises(
            FolderGone, match=r"moved or removed under this start.*attempts/0001\.json is gone"
        ):
            attempt.check()
        assert not attempt.holds()
        with attempt._lock:  # one may have been on its way
            pass
        remove_tree(*open_fs(url))
        time.sleep(0.7)  # more than a beat
    fs, path = open_fs(url)
    assert not fs.exists(path)


def test_two_starts_of_one_number_are_told_apart_by_their_tokens(url):
    """The folder was removed, so that the numbers began again at 1: the one whose file it is has
    it, the other not.
    """
    with take(url, 30.0, print) as forgotten:
        forgotten.check()
        remove_tree(*open_fs(url))
        with take(url, 30.0, print) as new:
            assert new.number == forgotten.number
            new.check()
            with pytest.raises(
                FolderGone, match=rf"0001\.json is that of process {os.getpid()} of "
            ):
                forgotten.check()
            with pytest.raises(FolderGone):
                forgotten.begin_again()
            forgotten.__exit__(None, None, None)
            new.check()
            start = newest_start(url)
            assert not start.is_over, "the forgotten one said of the new one that it has ended"


def test_a_start_whose_folder_was_moved_finds_it(tmp_path):
    url = str(tmp_path / "run")
    with take(url, 30.0, print) as attempt:
        write_atomic(*open_fs(f"{url}/config.yaml"), b"")
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with pytest.raises(
            FolderGone, match=r"was moved to \S+/elsewhere under this start"
        ) as fenced:
            attempt.check()
    assert fenced.value.now_at == str(tmp_path / "elsewhere")
    assert not (tmp_path / "run").exists()


def test_a_look_is_one_listing_and_no_more(s3, monkeypatch):
    """As many requests as before tokens were compared: the store says with the listing that the
    file is the same.
    """
    url = f"{s3}/one-look"
    fs, _ = open_fs(url)
    attempt = take(url, 30.0, print)
    attempt.check()
    requests = []
    call = type(fs.fs)._call_s3

    async def counted(self, method, *arguments, **options):
        requests.append(method)
        return await call(self, method, *arguments, **options)

    monkeypatch.setattr(type(fs.fs), "_call_s3", counted)
    for _ in range(3):
        attempt.check()
    assert [name for name in requests if "list" not in name] == []
    assert len(requests) <= 3


@pytest.mark.parametrize("operation", ["ls", "cat_file"])
def test_a_store_that_fails_for_a_moment_fences_nobody(tmp_path, monkeypatch, operation):
    attempt = take(str(tmp_path), 30.0, print)
    with monkeypatch.context() as broken:
        broken.setattr(LocalFileSystem, operation, Mock(side_effect=OSError("the store is away")))
        with pytest.raises(OSError, match="the store is away"):
            attempt.check()
    attempt.check()


def test_a_listing_that_is_behind_fences_nobody(tmp_path, monkeypatch):
    attempt = take(str(tmp_path), 30.0, print)
    monkeypatch.setattr(LocalFileSystem, "ls", lambda *arguments, **options: [])
    attempt.check()


@pytest.mark.parametrize(
    "left",
    [
        "checkpoints/step=000008-0003/COMMITTED",
        "rollouts/step=000009/_parts-0003.json",
        "stages/rollout/step=000009/part-0003-00001.parquet",
        "attempts/0003.beat",
    ],
)
def test_where_records_are_gone_no_number_is_used_twice(url, left):
    write_atomic(*open_fs(f"{url}/{left}"), b"")
    assert take(url, 0.2, print).number == 4
