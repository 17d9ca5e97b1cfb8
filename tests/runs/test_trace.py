"""The table ``trace``: the last start counts, damage is told, and clean, check and --fresh know
it.
"""

import json

import pytest
from siirl_storage import open_fs, stage_part

from siirl_dask.cli import main
from siirl_dask.commands.clean import clean
from siirl_dask.errors import DataError
from siirl_dask.observe.trace.trace_table import trace_table
from siirl_dask.planner.node import TRACE
from siirl_dask.runs.check import PartState, check_run
from siirl_dask.runs.folder import CONFIG_FILE, remove_run
from siirl_dask.runs.tables import tables_of
from siirl_dask.runs.trace import read_newest, read_trace, slowest_of
from siirl_dask.trace import Entry, Lane
from tests.observe.traces import check_events


def put(url, step, worker, attempt=1, seconds=1.0, name="rollout"):
    start, duration = round(step * 1e10), round(seconds * 1e9)
    task = Entry(Lane.CONTROL, "task", "train", False, "train", step, start, duration, None)
    node = Entry(Lane.COMPUTE, "node", name, False, "train", step, start, duration, None)
    part = trace_table([node, task], str(worker), "boot", 0)
    stage_part(f"{url}/trace/step={step:06d}", attempt, worker, part)


@pytest.fixture
def url(store_url):
    """A run of three steps on two workers; worker 1 is slow in the last one."""
    fs, root = open_fs(store_url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/{CONFIG_FILE}", b"run: {name: it}\n")
    for step in (1, 2, 3):
        for worker in (0, 1):
            put(store_url, step, worker, seconds=4.0 if step == 3 and worker else 1.0)
    return store_url


def test_a_trace_is_read_from_any_store_by_steps(url):
    assert read_trace(url).steps == [1, 2, 3]
    two = read_trace(url, range(2, 9))
    assert (two.steps, two.all_steps) == ([2, 3], [1, 2, 3])
    assert {(span.step, span.worker) for span in two.spans} == {
        (step, name) for step in (2, 3) for name in "01"
    }
    assert read_trace(url, most_bytes=1).steps == [3]
    assert read_trace(url, most_parts=4).steps == [2, 3]
    slowest = slowest_of(url)
    assert (slowest.node, slowest.worker, slowest.steps) == ("rollout", "1", 3)
    assert slowest.times_others == 2.0


def test_a_part_that_was_read_is_not_read_again_and_nothing_new_is_told_as_such(tmp_path):
    url, bounds = str(tmp_path), {"most_bytes": 2**20, "most_parts": 9}
    put(url, 4, 0)
    before = read_newest(url, [4, 5], **bounds)
    assert read_newest(url, [4, 5], **bounds, known=before.parts) is None
    put(url, 4, 1)
    (first,) = tmp_path.glob("trace/*/part-*-00000.*")
    first.write_bytes(b"?" * first.stat().st_size)
    both = read_newest(url, [4, 5], **bounds, known=before.parts)
    assert {span.worker for span in both.spans} == {"0", "1"}


def test_of_a_step_that_was_done_again_the_last_start_counts_and_clean_takes_the_other(tmp_path):
    for worker in (0, 1, 2):
        put(tmp_path, 2, worker, attempt=1, name="before")
    for worker in (0, 1):
        put(tmp_path, 2, worker, attempt=2, name="now")
    (tmp_path / CONFIG_FILE).write_text("run: {name: it}\n")
    spans = read_trace(str(tmp_path)).spans
    assert {(span.worker, span.name) for span in spans if span.lane is Lane.COMPUTE} == {
        ("0", "now"),
        ("1", "now"),
    }
    found = {
        finding.part: finding.state
        for finding in check_run(str(tmp_path), lambda n: None, lambda n: None)
    }
    assert (found[TRACE], found[f"{TRACE}/step=000002"]) == (PartState.WHOLE, PartState.UNFINISHED)
    said = clean(str(tmp_path), dry_run=False, keep_stages=None, replays=False)
    assert said.count(f"{TRACE}/step=000002/part-0001-") == 3
    assert len([*tmp_path.rglob("*.parquet")]) == 2


def test_check_finds_a_damaged_part_and_reading_it_says_so(tmp_path):
    for step in (1, 2):
        put(tmp_path, step, 0)
    part = tmp_path / "trace" / "step=000002" / "part-0001-00000.parquet"
    content = bytearray(part.read_bytes())
    content[20] ^= 1
    part.write_bytes(content)
    (tmp_path / CONFIG_FILE).write_text("run: {name: it}\n")
    found = check_run(str(tmp_path), lambda n: None, lambda n: None)
    damaged = [
        finding.part
        for finding in found
        if finding.state is PartState.DAMAGED and finding.part.startswith(TRACE)
    ]
    assert damaged == [f"{TRACE}/step=000002"]
    with pytest.raises(DataError, match="part-0001-00000"):
        read_trace(str(tmp_path))
    assert read_trace(str(tmp_path), range(2)).steps == [1]
    assert slowest_of(str(tmp_path)) is None


def test_a_fresh_start_removes_the_trace(tmp_path):
    put(tmp_path, 1, 0)
    remove_run(str(tmp_path), tables_of([]))
    assert not [*tmp_path.rglob("*.parquet")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "8:9"], "has no trace of step from 8 to 9: it has 2 steps, 1 to 2"),
        (["--steps", "9:8"], "the first step comes after the last"),
        (["--steps", "two"], "expected A:B or one step"),
        (
            ["-o", "/proc/none/trace.json"],
            "-o '/proc/none/trace.json': the trace cannot be written",
        ),
        (["--stepz", "3"], "unrecognized arguments: --stepz 3; did you mean '--step'"),
    ],
)
def test_what_the_command_cannot_do_is_said(tmp_path, arguments, said, capsys):
    (tmp_path / CONFIG_FILE).write_text("run: {name: it}\n")
    for step in (1, 2):
        put(tmp_path, step, 0)
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_trace_and_a_folder_without_a_run_are_told_apart(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(tmp_path)])
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / CONFIG_FILE).write_text("run: {name: it}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(tmp_path)])
    assert "holds no trace" in capsys.readouterr().err


def test_the_command_names_the_slow_one_and_writes_what_perfetto_opens(url, tmp_path, capsys):
    to = tmp_path / "trace.json"
    main(["trace", url, "--steps", "2:3", "-o", str(to)])
    said = capsys.readouterr().out
    assert "slowest   node 'rollout' on worker '1': 2.50 s a step" in said
    assert "uneven    node 'rollout' takes 2.5 times as long on worker '1'" in said
    slices = check_events(json.loads(to.read_text()))
    assert sum(map(len, slices.values())) == 8
