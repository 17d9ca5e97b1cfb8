"""A terminal or a pipe that knows few characters gets every answer: it ended commands with a
traceback.
"""

import os
import subprocess
import sys

import pytest

from tests.forked_programs import run_forked
from tests.written_runs import save_rows, whole_run

COMMANDS = {
    "rollouts": ["rollouts", "{run}"],
    "samples": ["rollouts", "{run}", "--worst", "1"],
    "sql": ["rollouts", "{run}", "SELECT prompt_text, reward FROM rollouts LIMIT 1"],
    "trace": ["trace", "{run}"],
    "watch": ["watch", "{run}"],
    "check": ["check", "{run}"],
    "clean": ["clean", "{run}", "--dry-run"],
    "analyze": ["plan", "--analyze", "{run}"],
    "unknown": ["rollouts", "{run}/\N{LATIN SMALL LETTER U WITH DIAERESIS}"],
}

IN_ENCODING = """
import sys

for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
    stream.reconfigure(encoding=sys.argv[1], errors=errors)
from siirl_dask.cli import main

main(sys.argv[2:])
"""
"""Does to streams as PYTHONIOENCODING at an interpreter's start, and runs the command."""
ENDS = {"unknown": 2, "check": 1}
"""Exit codes other than 0: the run that was never run has no checkpoint."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    url = whole_run(tmp_path_factory.mktemp("run") / "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve")
    save_rows(
        url,
        "rollouts",
        11,
        [("\N{SNOWMAN} \N{LATIN SMALL LETTER E WITH ACUTE}?", "1", "\N{GRINNING FACE}", 0.0)] * 2,
    )
    return url


def check_end(command, done):
    assert "UnicodeEncodeError" not in done.stderr
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == ENDS.get(command, 0), done.stderr[-2000:]
    assert done.stdout or command == "unknown"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_to_what_knows_few_characters(command, encoding, run, tmp_path):
    arguments = [text.format(run=run) for text in COMMANDS[command]]
    check_end(command, run_forked("-c", IN_ENCODING, encoding, *arguments, folder=tmp_path))


@pytest.mark.parametrize("command", ["rollouts", "unknown"])
def test_what_the_environment_says_of_characters_does_not_end_a_command(command, run):
    done = subprocess.run(
        [sys.executable, "-m", "siirl_dask.cli", *(t.format(run=run) for t in COMMANDS[command])],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        text=True,
        timeout=150,
    )
    check_end(command, done)
