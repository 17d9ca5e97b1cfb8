"""A command whose reader, such as ``head``, closes the pipe ends as SIGPIPE ends a program: in
silence.
"""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import shipped
from tests.conftest import digits_overrides

CONFIG = str(shipped("quickstart.yaml"))
CLOSED = 128 + 13  # what a shell reports of a process that SIGPIPE ended
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
MODULE = ["-m", "siirl_dask.cli"]


def run_with_reader(arguments, lines, environment=BUFFERED):
    """Run a Python process and read so many lines of it, then close the pipe; returns exit code,
    lines and stderr.
    """
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        seen = [process.stdout.readline() for _ in range(lines)]
        process.stdout.close()
        err = process.stderr.read()
        return process.wait(timeout=120), seen, err


@pytest.fixture
def rollouts(tmp_path):
    part = tmp_path / "run" / "rollouts" / "step=000001" / "part-00000-of-00001.parquet"
    part.parent.mkdir(parents=True)
    pq.write_table(pa.table({"reward": [0.5], "response_ids": [[1]]}), part)
    return str(tmp_path / "run")


@pytest.mark.parametrize(("form", "unbuffered"), [("text", False), ("json", True)])
def test_plan_ends_quietly(form, unbuffered):
    environment = {**BUFFERED, **({"PYTHONUNBUFFERED": "1"} if unbuffered else {})}
    assert run_with_reader([*MODULE, "plan", CONFIG, "--format", form], 0, environment) == (
        CLOSED,
        [],
        "",
    )


def test_plan_into_head_shows_the_first_line():
    command = f"{sys.executable} -m siirl_dask.cli plan {CONFIG} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=BUFFERED)
    first, code = done.stdout.splitlines()
    assert first.startswith("note: ")
    assert (int(code) in (0, CLOSED), done.stderr) == (True, "")  # 0 where the pipe held all of it


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]], ids=" ".join)
def test_help_ends_quietly(arguments):
    assert run_with_reader([*MODULE, *arguments], 0) == (CLOSED, [], "")


def test_help_of_a_script_ends_quietly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from siirl_dask import grpo, main\nmain(grpo)\n")
    assert run_with_reader([str(script), "--help"], 0) == (CLOSED, [], "")


def test_rollouts_ends_quietly(rollouts):
    assert run_with_reader([*MODULE, "rollouts", rollouts], 0) == (CLOSED, [], "")


@pytest.mark.parametrize("arguments", [["plan", "no.yaml"], ["rollouts", "nowhere"]], ids=" ".join)
def test_an_error_is_still_told_and_has_its_own_exit_code(arguments):
    code, _, err = run_with_reader([*MODULE, *arguments], 0)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_run_ends_quietly_and_its_summary_says_why(digits_task, tmp_path, cluster_address):
    overrides = [
        *digits_overrides(digits_task, tmp_path / "run"),
        f"cluster.address={cluster_address}",
    ]
    code, seen, err = run_with_reader(
        [*MODULE, "run", CONFIG, *overrides, "observe.progress=true"], 1
    )
    assert (code, seen, err) == (CLOSED, ["starting 4 workers\n"], "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == (
        "failed",
        "BrokenPipeError: whoever read the output has closed it",
    )


def test_numbers_that_a_console_prints_end_quietly():
    code = (
        "from siirl_dask.commands.script import exit_with_message\n"
        "from siirl_dask.observe import PipeConsole\n"
        "exit_with_message(lambda: PipeConsole().print('x'))"
    )
    assert run_with_reader(["-c", code], 0) == (CLOSED, [], "")
