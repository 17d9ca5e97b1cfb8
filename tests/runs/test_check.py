"""``siirl-dask check``: a whole run is whole, damage anywhere is named, and what a resume makes
of it is true.
"""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from siirl_storage import StorageError, commit_parts, open_fs, read_record, stage_part, write_part
from siirl_storage.digests import FileDigest

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, load_recorded, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.recovery.resume import find_resume_point
from siirl_dask.errors import SiirlError
from siirl_dask.observe import (
    MetricsLog,
    Record,
    Status,
    Summary,
    read_metrics,
    read_summary,
    write_summary,
)
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt import take
from siirl_dask.runs.check import PartState, check_run
from siirl_dask.runs.checkpoint_state import CheckpointState as RunState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.folder import write_identity
from siirl_dask.runs.identity_file import DueTable
from siirl_dask.runs.retention import find_leftovers, remove_leftovers
from siirl_dask.runs.stages import describe_stage
from tests.conftest import digits_overrides

WEIGHTS = bytes(range(256)) * 16
STEPS = 6


def config_of(digits_task, url):
    return load_config_file(
        shipped("quickstart.yaml"), [*digits_overrides(digits_task, url), "run.steps=9"]
    )


@pytest.fixture(scope="module")
def whole(digits_task, tmp_path_factory):
    """The folder of a run with six steps and checkpoints of steps 2 and 4."""
    url = tmp_path_factory.mktemp("whole") / "run"
    file = config_of(digits_task, url)
    due = {
        "rollouts": DueTable(phase=Phase.TRAIN, since=1),
        "validation": DueTable(phase=Phase.VALIDATION, since=0),
    }
    write_identity(file.config, dags(file)[0], replace=False, tables=due)
    log = MetricsLog(str(url), None, 1)
    with take(str(url), 30.0, print) as attempt:
        checkpoints = Checkpoints(attempt=attempt, keep=2)
        for step in range(1, STEPS + 1):
            save(url, step, 1)
            log.write(
                Record(step=step, phase=Phase.TRAIN, seconds=1.0, metrics={"reward/mean": 0.5})
            )
            if step in (2, 4):
                folder = checkpoints.folder(step)
                fs, path = open_fs(folder)
                fs.makedirs(f"{path}/policy")
                for name in ("weights", "optimizer"):
                    fs.pipe_file(f"{path}/policy/{name}", WEIGHTS)
                written = {
                    f"policy/{name}": FileDigest.of(WEIGHTS) for name in ("weights", "optimizer")
                }
                checkpoints.commit(folder, RunState(step=step, roles=["policy"]), written)
    failed = Summary(
        run_id="it",
        status=Status.FAILED,
        steps=STEPS,
        workers=2,
        seconds=9.0,
        samples_per_second=1.0,
    )
    write_summary(str(url), failed)
    return url


@pytest.fixture
def url(whole, tmp_path):
    """A copy of the run to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def save(url, step, attempt, table="rollouts"):
    rows = pa.table(
        {
            "row_id": range(64),
            "reward": [0.5] * 64,
            "text": [f"{step} {row}" * 9 for row in range(64)],
        }
    )
    folder = f"{url}/{table}/step={step:06d}"
    about = describe_stage(
        step=step, table=table, digest="d", attempt=attempt, metrics={}, position=None, spent=[]
    )
    commit_parts(
        folder, attempt, [stage_part(folder, attempt, part, rows) for part in range(2)], about
    )


def check(url):
    """Return parts by state, and the texts of what is damaged with their remedies."""
    total, read = [], []
    found = check_run(str(url), total.append, read.append)
    assert sum(read) <= total[0]
    by_state = {state: [one.part for one in found if one.state is state] for state in PartState}
    return by_state, [
        f"{one.text}; {one.remedy}" for one in found if one.state is PartState.DAMAGED
    ]


def test_a_whole_run_is_whole_and_a_step_under_way_is_no_damage(url, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", str(url)])
    said = capsys.readouterr().out
    assert "whole       rollouts: 6 steps, 12 parts" in said
    assert "nothing is damaged" in said
    stage_part(f"{url}/rollouts/step=000007", 1, 0, pa.table({"row_id": [0]}))
    stage_part(f"{url}/rollouts/step=000006", 0, 0, pa.table({"row_id": [0]}))
    (url / "checkpoints" / "step=000006-0001").mkdir()
    (url / "checkpoints" / "step=000006-0001" / "weights").write_bytes(WEIGHTS)
    with (url / "metrics.jsonl").open("a") as log:
        log.write('{"step": 7, "pha')
    by_state, damaged = check(url)
    assert by_state[PartState.UNFINISHED] == [
        "metrics.jsonl",
        "rollouts/step=000006",
        "rollouts/step=000007",
        "checkpoints/step=000006-0001",
    ]
    assert not damaged


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_of_a_checkpoint_or_of_a_table_s_page_that_is_changed_is_noticed(url, data):
    places = [path for path in url.rglob("*") if path.is_file() and path.parent.name == "policy"]
    places += list(url.rglob("*.parquet"))
    file = data.draw(st.sampled_from(sorted(places)))
    content = file.read_bytes()
    span = range(len(content))
    if file.suffix == ".parquet":
        column = pq.ParquetFile(file).metadata.row_group(0).column(2)
        end = (
            column.dictionary_page_offset or column.data_page_offset
        ) + column.total_compressed_size
        span = range(end - 20, end)  # behind the page's header
    at = data.draw(st.sampled_from(span))
    file.write_bytes(
        content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    )
    try:
        by_state, _ = check(url)
        assert len(by_state[PartState.DAMAGED]) == 1
        assert str(file.relative_to(url)).startswith(by_state[PartState.DAMAGED][0])
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", b"run: {nmae: x}", "unknown key 'run.nmae'"),
        ("config.yaml", b"run: {name: \xff", "resume, evaluation or export cannot"),
        ("config.yaml", None, "it is gone; samples and metrics can be read"),
        ("dag.json", b"{}", "is not a run's DAG"),
        ("dag.json", None, "it is gone; a resume writes it anew"),
        ("attempts/0001.json", b"[]", "does not say who trained the run"),
        (
            "metrics.jsonl",
            b'{"step": 1}\n',
            "line 1: expected step, phase, seconds and metrics.*a resume refuses",
        ),
        ("summary.json", b"\xff", "the next end of the run writes it anew"),
        ("rollouts/step=000003/_parts-0001.json", b"{", "not a usable record.*its rows are lost"),
        (
            "rollouts/step=000003/part-0001-00001.parquet",
            None,
            "part-0001-00001.parquet is gone; its rows are lost",
        ),
        (
            "rollouts/step=000005/part-0001-00000.parquet",
            b"PAR1",
            "has 4 bytes.* after step 4, and generates this step and the later ones again",
        ),
        (
            "checkpoints/step=000002-0001/policy/weights",
            None,
            "is gone; a resume does not need it: .* step 4",
        ),
        (
            "checkpoints/step=000004-0001/policy/weights",
            b"",
            "has 0 bytes.*passes over it, and goes on after step 2",
        ),
        (
            "checkpoints/step=000004-0001/COMMITTED",
            b"{}",
            "not a checkpoint's record.*goes on after step 2",
        ),
        (
            "checkpoints/step=000004-0001/state.json",
            b"{}",
            "state.json has 2 bytes, .*goes on after step 2",
        ),
    ],
)
def test_damage_is_named_with_what_a_resume_makes_of_it(url, name, content, said, capsys):
    (url / name).unlink()
    if content is not None:
        (url / name).write_bytes(content)
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(url)])
    shown = " ".join(capsys.readouterr().out.split()).replace(" samples", "; samples")
    _, damaged = check(url)
    assert len(damaged) == 1
    assert re.search(said, damaged[0], re.DOTALL), damaged
    assert "1 damaged" in shown


@pytest.mark.parametrize("tables", [("rollouts", "stages/rollout"), ("stages/rollout", "rollouts")])
def test_of_damaged_rows_it_names_the_table_from_which_the_step_goes_on(url, tables):
    save(url, 5, 1, table="stages/rollout")
    assert "stages/rollout" in check(url)[0][PartState.WHOLE]
    damaged, whole = tables
    (url / damaged / "step=000005" / "part-0001-00000.parquet").write_bytes(b"PAR1")
    (text,) = check(url)[1]
    assert text.endswith(f"a resume goes on after step 4, and takes this step from {whole}")


def test_a_resume_begins_where_the_check_says(url, digits_task):
    file = config_of(digits_task, url)
    config, dag = file.config, dags(file)[0]
    (url / "checkpoints" / "step=000004-0001" / "state.json").write_bytes(b"{}")
    assert "goes on after step 2" in check(url)[1][0]
    assert find_resume_point(config, dag, fresh=False, force=False).done == 2


def test_steps_that_the_metrics_lack_are_named(url):
    lines = (url / "metrics.jsonl").read_text().splitlines(keepends=True)
    (url / "metrics.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["step"] not in (2, 5))
    )
    assert check(url)[1] == ["it has no line of the steps 2, 5; they are lost"]


def test_tables_without_a_record_are_checked_too(url):
    """An evaluation writes such tables: the names of their parts say how many there are."""
    for part in range(2):
        write_part(
            f"{url}/evaluations/it/samples/step=000004", part, 2, pa.table({"row_id": [part]})
        )
    assert "evaluations/it/samples" in check(url)[0][PartState.WHOLE]
    (url / "evaluations/it/samples/step=000004/part-00001-of-00002.parquet").unlink()
    assert "evaluations/it/samples/step=000004" in check(url)[0][PartState.UNFINISHED]


def test_a_run_in_a_store_is_checked_as_one_on_local_files(url, s3, capsys):
    fs, path = open_fs(f"{s3}/checked")
    fs.put(str(url), path, recursive=True)
    assert check(f"{s3}/checked") == check(url)
    fs.pipe_file(f"{path}/checkpoints/step=000004-0001/policy/weights", WEIGHTS[::-1])
    with pytest.raises(SystemExit, match="1"):
        main(["check", f"{s3}/checked"])
    assert "policy/weights has the SHA-256" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    for url in (str(tmp_path), str(tmp_path / "none"), "nope://run"):
        with pytest.raises(SystemExit, match="2"):
            main(["check", url])
    assert "holds no run: expected a folder with a config.yaml" in capsys.readouterr().err


def without_lines(path, count):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) - count]))


@pytest.mark.parametrize("count", [*range(1, STEPS + 1), None])
def test_lines_of_metrics_that_the_summary_counts_and_nobody_has_are_damage(url, count):
    """The last lines, all of them, or the file: what is missing at the end was not noticed."""
    if count is None:
        (url / "metrics.jsonl").unlink()
    else:
        without_lines(url / "metrics.jsonl", count)
    parts, said = check(url)
    assert "metrics.jsonl" in parts[PartState.DAMAGED]
    assert "they are lost" in str(said)


@pytest.mark.parametrize(
    "gone", ["checkpoints", "checkpoints/*/COMMITTED", "checkpoints/step=000004-0001"]
)
def test_the_checkpoint_with_which_a_run_ended_is_missed(url, gone):
    complete = Summary(
        run_id="it", status=Status.COMPLETE, steps=4, workers=2, seconds=9.0, samples_per_second=1.0
    )
    write_summary(str(url), complete)
    assert "checkpoints" not in check(url)[0].get(PartState.DAMAGED, [])
    for path in list(url.glob(gone)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    assert "checkpoints" in check(url)[0][PartState.DAMAGED]


@pytest.mark.parametrize(
    ("key", "value"), [("status", "complete"), ("steps", STEPS - 1), ("seconds", 8.0)]
)
def test_a_changed_number_or_word_of_the_summary_is_noticed(url, key, value):
    changed = json.loads((url / "summary.json").read_text()) | {key: value}
    (url / "summary.json").write_text(json.dumps(changed))
    parts, said = check(url)
    assert "summary.json" in parts[PartState.DAMAGED]
    assert "it was altered" in str(said)


def swap(one, other):
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def rows_of(url, step, table="rollouts"):
    return url / table / f"step={step:06d}"


GONE = {
    "a step": (lambda url: shutil.rmtree(rows_of(url, 2)), [2]),
    "the record of a step": (lambda url: (rows_of(url, 2) / "_parts-0001.json").unlink(), [2]),
    "all that was saved": (lambda url: shutil.rmtree(url / "rollouts"), [1, 2, 3, 4]),
    "two steps are swapped": (lambda url: swap(rows_of(url, 1), rows_of(url, 3)), [1, 3]),
    "a step after the last checkpoint": (lambda url: shutil.rmtree(rows_of(url, 5)), []),
}


@pytest.mark.parametrize("case", GONE)
def test_rows_of_steps_that_were_committed_are_missed(url, case):
    damage, steps = GONE[case]
    damage(url)
    assert check(url)[0][PartState.DAMAGED] == [f"rollouts/step={step:06d}" for step in steps]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_complete_run_misses_every_step(url, step):
    complete = Summary(
        run_id="it",
        status=Status.COMPLETE,
        steps=STEPS,
        workers=2,
        seconds=9.0,
        samples_per_second=1.0,
    )
    write_summary(str(url), complete)
    shutil.rmtree(rows_of(url, step))
    assert f"rollouts/step={step:06d}" in check(url)[0][PartState.DAMAGED]


def test_rows_that_were_removed_on_purpose_are_not_missed(url):
    remove_leftovers(str(url), find_leftovers(str(url), keep_stages=1))
    assert not [*rows_of(url, 2).rglob("*.*")]
    assert not check(url)[0][PartState.DAMAGED]
    shutil.rmtree(rows_of(url, 3))
    assert check(url)[0][PartState.DAMAGED] == ["rollouts/step=000003"]


def test_of_a_run_of_an_earlier_version_nothing_is_missed(url):
    (url / "identity.json").unlink()
    shutil.rmtree(rows_of(url, 2))
    for record in url.rglob("_parts-*.json"):
        written = json.loads(record.read_text())
        del written["sha256"], written["about"]["step"], written["about"]["table"]
        record.write_text(json.dumps(written))
    lines = [json.loads(line) for line in (url / "metrics.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key != "sha256"} for line in lines]
    (url / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in old))
    summary = json.loads((url / "summary.json").read_text())
    del summary["sha256"]
    (url / "summary.json").write_text(json.dumps(summary))
    assert not check(url)[0][PartState.DAMAGED]


def test_a_validation_without_rows_and_one_without_its_line_are_missed(url):
    log = MetricsLog(str(url), None, 1)
    for step in (0, 4):
        save(url, step, 1, table="validation")
        log.write(
            Record(step=step, phase=Phase.VALIDATION, seconds=1.0, metrics={"reward/mean": 0.5})
        )
    assert not check(url)[0][PartState.DAMAGED]
    lines = (url / "metrics.jsonl").read_text().splitlines(keepends=True)
    (url / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert check(url)[1] == [
        "it has no line of the validations after the steps 4; they are lost; their rows are there"
    ]
    (url / "metrics.jsonl").write_text("".join(lines))
    shutil.rmtree(rows_of(url, 0, "validation"))
    assert check(url)[0][PartState.DAMAGED] == ["validation/step=000000"]


def test_a_run_that_failed_misses_all_its_checkpoints_but_not_one_that_was_begun(url):
    shutil.rmtree(url / "checkpoints")
    said = (url / "config.yaml").read_text()
    every = load_recorded(said, "config.yaml").checkpoint.every
    failed = Summary(
        run_id="it",
        status=Status.FAILED,
        steps=every + 1,
        workers=2,
        seconds=9.0,
        samples_per_second=1.0,
    )
    write_summary(str(url), failed)
    assert "checkpoints" in check(url)[0][PartState.DAMAGED]
    (url / "checkpoints" / "step=000050-0001").mkdir(parents=True)
    (url / "checkpoints" / "step=000050-0001" / "BEGUN").write_bytes(b"")
    assert "checkpoints" not in check(url)[0][PartState.DAMAGED]


def read_all(url):
    """Return what readers make of the small files."""
    read = []

    def records(at):
        return [read_record(str(one)) for one in sorted(Path(at).glob("rollouts/*"))]

    for reader in (read_metrics, read_summary, records):
        try:
            read.append(reader(str(url)))
        except (SiirlError, StorageError, ValueError):
            read.append(None)
    return read


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_byte_of_a_small_file_is_noticed_or_changes_nothing_that_is_read(url, data):
    small = ("config.yaml", "dag.json", "metrics.jsonl", "summary.json")
    places = [*(url / name for name in small), *url.rglob("_parts-*.json")]
    file = data.draw(st.sampled_from(sorted(places)))
    content, before = file.read_bytes(), read_all(url)
    at = data.draw(st.integers(0, len(content) - 1))
    file.write_bytes(
        content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    )
    try:
        by_state, _ = check(url)
        harmless = file.name not in ("config.yaml", "dag.json") and read_all(url) == before
        assert by_state[PartState.DAMAGED] or harmless
    finally:
        file.write_bytes(content)
