"""No command shows a secret of a URL, a command or an error: not on a page, in a file, in a
terminal or in a log.
"""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.failure_text import failure_text, run_failure_of
from siirl_dask.driver.phases import dags
from siirl_dask.errors import DataError, RunError
from siirl_dask.observe import (
    MetricsLog,
    Progress,
    Record,
    Restart,
    Status,
    Summary,
    announce,
    write_summary,
)
from siirl_dask.planner import Phase
from siirl_dask.runs.folder import write_identity
from tests.conftest import digits_overrides

SECRET = "S3CR3T"
MODEL = f"https://user:{SECRET}@host/model"


@pytest.fixture
def run(digits_task, tmp_path):
    """A run that failed, below a URL with a key in it, as an earlier version wrote its summary."""
    url = tmp_path / f"run?key={SECRET}"
    file = load_config_file(shipped("quickstart"), digits_overrides(digits_task, url))
    write_identity(file.config, dags(file)[0], replace=False)
    log = MetricsLog(str(url), None, 1)
    log.write(Record(step=1, phase=Phase.TRAIN, seconds=1.0, metrics={"reward/mean": 0.5}))
    summary = Summary(
        run_id="it",
        status=Status.FAILED,
        error=f"DataError: no table at {MODEL}",
        steps=1,
        workers=2,
        seconds=9.0,
        samples_per_second=1.0,
        restarts=(Restart(cause=f"{MODEL} is gone", steps=1),),
    )
    write_summary(str(url), summary)
    return url


@pytest.mark.parametrize("form", ["text", "json", "svg"])
def test_a_plan_shows_no_secret_of_a_dataset_that_is_not_there_or_of_a_tool_server(
    form, digits_task, tmp_path, capsys
):
    given = [
        f"data.url={tmp_path}/data?key={SECRET}/train.parquet",
        f"run.url={tmp_path}/run?key={SECRET}",
    ]
    given += [
        f"validation.url={tmp_path}/data?token={SECRET}/test.parquet",
        "validation.test_url=null",
    ]
    given += [
        f"environments.mcp_servers={{web: 'https://user:{SECRET}@host/mcp'}}",
        "data.prepare=null",
    ]
    given += [f"model.path={digits_task.model}", "data.prepare_options={}", f"--format={form}"]
    main(["plan", str(shipped("quickstart_tools")), *given])
    said = capsys.readouterr()
    assert said.out
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize(
    "command", [["check"], ["watch", "--once"], ["report", "-o", "report.html"], ["rollouts"]]
)
def test_a_command_that_reads_a_run_shows_no_secret_of_its_url_or_of_its_error(
    command, run, monkeypatch, capsys
):
    monkeypatch.chdir(run.parent)
    name, *options = command
    with suppress(SystemExit):
        main([name, str(run), *options])
    said = capsys.readouterr()
    assert said.out + said.err
    pages = "".join(page.read_text() for page in run.parent.glob("*.html"))
    assert bool(pages) == (name == "report")
    assert SECRET not in said.out + said.err + pages


def test_an_error_is_printed_and_recorded_without_secrets(run, capsys):
    error = DataError(f"dataset {MODEL!r} is gone")
    error.report = f"worker 1 reads {MODEL}"
    error.add_note(f"export HF_TOKEN={SECRET}")
    announce(error)
    assert SECRET not in capsys.readouterr().err
    failure = run_failure_of(error, f"siirl-dask run c.yaml model.path={MODEL}")
    assert SECRET not in f"{failure}"
    assert "model.path=https://[redacted]@host/model" in str(failure.resume)


def test_what_is_printed_after_a_failure_has_no_secrets(digits_task, run):
    config = load_config_file(shipped("quickstart"), digits_overrides(digits_task, run)).config
    assert SECRET not in str(
        failure_text(config, RunError("x"), 1, f"siirl-dask run c.yaml model.path={MODEL}")
    )


def test_the_start_of_a_run_names_its_folder_without_secrets(run, capsys):
    progress = Progress(1)
    progress.start(None, str(run))
    progress.close()
    said = capsys.readouterr().out
    assert "run?key=[redacted]" in said
    assert SECRET not in said


def test_an_imported_table_does_not_record_the_secrets_of_its_sources(tmp_path):
    folder = tmp_path / f"rows?key={SECRET}"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    main(["data", "import", str(folder / "rows.jsonl"), str(tmp_path / "table")])
    written = [path.read_bytes() for path in (tmp_path / "table").rglob("*") if path.is_file()]
    assert written
    assert not any(SECRET.encode() in content for content in written)
