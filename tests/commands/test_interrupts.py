"""Ctrl-C ends a command with one line and exit code 130, also while its modules are imported."""

import signal
import subprocess
import sys
import time

import pytest

from siirl_dask.commands.program.interrupts import EndsAtOnce
from tests.written_runs import whole_run

PROGRAM = """
import os, sys


class FirstImport:
    def find_spec(self, name, path=None, target=None):
        if name == "siirl_dask.commands.program.ending":
            os.write(2, b".")
        return None


sys.meta_path.insert(0, FirstImport())
from siirl_dask.cli import main
main()
"""
"""Shows by one byte that the program imports its modules: what comes before takes milliseconds."""
LONG = (
    "SELECT count(*) FROM range(100000) a, range(100000) b, range(100000) c WHERE a.range + b.range "
    "+ c.range < 7"
)


def hear_interrupts():
    """Shells start background jobs, and so perhaps these tests, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(delay, *arguments):
    """Exit code, output and errors of a command that gets SIGINT so many seconds after its
    beginning.
    """
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    ) as process:
        assert process.stderr.read(1) == "."
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.4, 0.7])
def test_a_command_that_is_stopped_while_it_imports_says_so_in_one_line(delay, tmp_path):
    code, out, err = interrupted(delay, "plan", "siirl_dask:quickstart", f"run.url={tmp_path}/run")
    assert (code, err, out) == (130, "stopped by the user\n", "")


def test_a_query_that_is_stopped_says_so_in_one_line(tmp_path):
    run = whole_run(tmp_path / "run")
    assert interrupted(4.0, "rollouts", run, LONG) == (130, "", "stopped by the user\n")


def test_a_background_job_ignores_ctrl_c_as_its_shell_asked():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with EndsAtOnce():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_an_exception_again_once_modules_are_imported():
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with EndsAtOnce():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outer)
