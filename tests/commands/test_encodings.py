"""A terminal or a pipe that knows few characters gets every answer: it ended commands with a
traceback.
"""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_to_what_knows_few_characters(command, encoding, run):
    arguments = [text.format(run=run) for text in COMMANDS[command]]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "siirl_dask.cli", *arguments],
        capture_output=True,
        env=environment,
        timeout=150,
    )
    assert b"UnicodeEncodeError" not in done.stderr
    assert b"Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == ENDS.get(command, 0), done.stderr[-2000:]
    assert done.stdout or command == "unknown"
