"""Sandboxes of every kind, each used by root and by a user: a process that runs programs in one for a test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import siirl_storage

from siirl_dask.rewards.code_execution import places

ROOT = Path(__file__).parents[2]
WHO = ("root", "user")
KINDS = [pytest.param(("namespaces", who), id=f"namespaces-{who}") for who in WHO] + [
    pytest.param((how, who), id=f"{how}-{who}", marks=pytest.mark.slow)
    for how in ("bubblewrap", "runsc")
    for who in WHO
]
"""Every kind of sandbox and who starts it. What takes another program runs with the slow tests."""
USER = 54321  # of no account
USABLE = """
import os, sys, cloudpickle, siirl_storage
assert sys.version_info >= (3, 11) and os.access(sys.executable, os.X_OK) and os.access(sys.base_prefix, os.R_OK)
"""  # setpriv starts even a program that the user may not read
SERVE = """
import json, sys
from siirl_dask.rewards.code_execution import sandbox
for line in sys.stdin:
    name, arguments, limits = json.loads(line)
    try:
        print(json.dumps(getattr(sandbox, name)(*arguments, sandbox.Limits(**limits))), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
"""


class Sandboxes:
    """Runs programs in sandboxes of one kind. Their limits may be given with each."""

    def __init__(self, how: str, who: str) -> None:
        if not sys.platform.startswith("linux"):
            pytest.skip("isolation takes Linux")
        if how != "namespaces" and shutil.which("bwrap" if how == "bubblewrap" else how) is None:
            pytest.skip(f"{how} is not installed")
        self.how = how
        self._process = subprocess.Popen(
            [*_as(who), python(who, how), "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": _path(), "SECRET_KEY": "hidden"},
        )
        try:
            printed = self.output("print('runs')")
        except AssertionError as error:
            self.close()
            pytest.skip(f"{how} does not run here as {who}: {error}")
        assert printed == "runs\n"

    def output(self, code: str, stdin: str = "", **limits: Any) -> str | None:
        return self._call("output", code, stdin, **limits)

    def passes(self, code: str, test: str, **limits: Any) -> bool:
        return self._call("passes", code, test, **limits)

    def close(self) -> None:
        self._process.communicate()

    def _call(self, name: str, *arguments: str, **limits: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limits = {"seconds": 20.0, "isolate": self.how} | limits
        print(json.dumps([name, arguments, limits]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert not isinstance(answer, dict), answer["error"]
        return answer


def _as(who: str) -> list[str]:
    """Return the command's part that makes it run as root or as a user; skips where this process may not."""
    if who == "root":
        if places.program_user() is None:
            pytest.skip("takes the machine's root")
        return []
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


@cache
def python(who: str, how: str) -> str:
    """Return a Python that the user may run. One below root's own folder is for root alone, and for our namespaces."""
    if os.geteuid() != 0 or (who, how) == ("root", "namespaces"):
        return sys.executable
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [*_as("user"), path, "-c", USABLE]
        done = (
            subprocess.run(command, capture_output=True, cwd="/", env={"PYTHONPATH": _path()}) if _there(path) else None
        )
        if done is not None and done.returncode == 0:
            return path
    pytest.skip("no Python 3.11 that another user may run, or none of our own files that he may read")


def _there(path: str) -> bool:
    return Path(path).exists()


def _path() -> str:
    ours = (str(Path(siirl_storage.__file__).parents[1]), str(Path(cloudpickle.__file__).parents[1]))
    return os.pathsep.join([str(ROOT), *ours])
