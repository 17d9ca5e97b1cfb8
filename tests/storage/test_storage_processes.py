"""Several processes on one local table, and processes that are killed while they write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import siirl_storage
from siirl_storage import Snapshot, TableNotFound, append, create_table, open_table
from siirl_storage.conformance import sample

HEAD = """
import os, signal, sys
from siirl_storage import *
from siirl_storage.conformance import sample
url, number = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(siirl_storage.__file__).parents[1])}


def start(body: str, url: str, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HEAD + body, url, str(number)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        bufsize=1,
    )


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def all_at_once(body: str, url: str, count: int = 4) -> list[str]:
    """Start ``body`` in ``count`` processes at once and return what each printed."""
    processes = [start(body, url, number) for number in range(count)]
    assert [line(process) for process in processes] == ["ready"] * count
    for process in processes:
        go(process)
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return outputs


def test_of_several_processes_one_creates_the_file_and_the_table(tmp_path: Path) -> None:
    body = """
fs, path = open_fs(join(url, "lock"))
for what in (lambda: write_exclusive(fs, path, sys.argv[2].encode()), lambda: create_table(url, [sample(number, 3)])):
    try:
        what()
        print("won", end=" ")
    except Conflict:
        print("lost", end=" ")
"""
    outputs = [output.split() for output in all_at_once(body, str(tmp_path))]
    for column in zip(*outputs, strict=True):
        assert sorted(column) == ["lost", "lost", "lost", "won"]
    assert (tmp_path / "lock").read_text() == str([output[0] for output in outputs].index("won"))
    creator = [output[1] for output in outputs].index("won")
    assert open_table(str(tmp_path)).to_table().equals(sample(creator, 3))
    assert len(list((tmp_path / "data").iterdir())) == 1, (
        "a loser left its rows in the table's folder"
    )


def test_appends_of_several_processes_lose_no_row_and_stay_together(tmp_path: Path) -> None:
    create_table(str(tmp_path), [], schema=sample(0, 0).schema)
    body = """
for turn in range(10):
    start = 1000 * number + 10 * turn
    append(url, [sample(start, 5), sample(start + 5, 5)], rows_per_part=3)
"""
    all_at_once(body, str(tmp_path))
    rows = open_table(str(tmp_path)).to_table()["row"].to_pylist()
    blocks = [tuple(rows[at : at + 10]) for at in range(0, len(rows), 10)]
    assert sorted(blocks) == [
        tuple(range(start, start + 10))
        for process in range(4)
        for start in range(1000 * process, 1000 * process + 100, 10)
    ]
    assert open_table(str(tmp_path)).version == 41


def check_whole(snapshot: Snapshot) -> None:
    """Each commit of the writers below adds 10 rows, numbered on."""
    assert snapshot.version is not None
    assert snapshot.to_table().equals(sample(0, 10 * snapshot.version))


def test_kill_9_at_random_moments_leaves_whole_snapshots_only(tmp_path: Path) -> None:
    body = """
done = number
while True:
    append(url, [sample(10 * done, 10)], rows_per_part=3)
    done += 1
    print(done, flush=True)
"""
    url, rng = str(tmp_path), random.Random()
    done = create_table(url, [sample(0, 10)]).version
    for _ in range(5):
        process = start(body, url, done or 0)
        assert line(process) == "ready"
        go(process)
        for _ in range(rng.randrange(1, 12)):
            done = int(line(process))
        process.kill()
        rest = process.communicate(timeout=60)[0].split()
        done = int(rest[-1]) if rest else done
        snapshot = open_table(url)
        assert snapshot.version in (done, done + 1), "a commit that was reported is gone"
        check_whole(snapshot)
        done = snapshot.version


@pytest.mark.parametrize("first", [True, False], ids=["create", "append"])
def test_kill_9_before_each_file_operation_leaves_whole_snapshots_only(
    tmp_path: Path, first: bool
) -> None:
    body = """
left = number
def hook(event, arguments):
    global left
    writes = event in ("os.rename", "os.link", "os.remove", "os.mkdir") or event == "open" and arguments[1] == "xb"
    if writes and str(arguments[0]).startswith(url):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""
    body += "create_table(url, [sample(0, 10)])" if first else "append(url, [sample(10, 10)])"

    def die_at(number: int) -> int:
        url = str(tmp_path / f"at-{number}")
        if not first:
            create_table(url, [sample(0, 10)])
        process = start(body, url, number)
        process.communicate("go\n", timeout=60)
        try:
            check_whole(open_table(url))
        except TableNotFound:
            assert first
            create_table(url, [sample(0, 10)])
        before = open_table(url).version or 0
        check_whole(append(url, [sample(10 * before, 10)]))
        return process.returncode

    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(die_at, range(1, 10)))
    assert codes == sorted(codes), "a later operation killed, and an earlier one did not"
    assert codes.count(-signal.SIGKILL) >= 6, (
        "the writer was killed at fewer operations than it makes"
    )
    assert codes[-1] == 0, "there are operations that were not tried"
