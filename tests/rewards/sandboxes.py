"""Sandboxes of every kind, each used by root and by a user: a process that runs programs in one
for a test.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

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
import os, sys
assert sys.version_info >= (3, 11) and os.access(sys.executable, os.X_OK) and os.access(sys.base_prefix, os.R_OK)
"""  # setpriv starts even a program that the user may not read
SERVE = """
import json, sys, types
for name in ("siirl_dask", "siirl_dask.rewards"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from siirl_dask.rewards.code_execution import sandbox
for line in sys.stdin:
    name, arguments, limits = json.loads(line)
    try:
        print(json.dumps(getattr(sandbox, name)(*arguments, sandbox.SandboxLimits(**limits))), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
"""  # without the packages around the sandbox: another user's Python has none of what those import


class Sandboxes:
    """Runs programs in sandboxes of one kind. Their limits may be given with each."""

    def __init__(self, how: str, who: str) -> None:
        if not sys.platform.startswith("linux"):
            pytest.skip("isolation takes Linux")
        if how != "namespaces" and shutil.which("bwrap" if how == "bubblewrap" else how) is None:
            pytest.skip(f"{how} is not installed")
        self.how = how
        self._process = subprocess.Popen(
            [*_as(who), python(who, how), "-c", SERVE, _code(who, how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PATH": os.environ["PATH"], "SECRET_KEY": "hidden"},
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
    """Return the command's part that makes it run as root, as a container's root, which may not
    mount, or as a user; skips where this process may not.
    """
    if who in ("root", "container"):
        if places.program_user() is None:
            pytest.skip("takes the machine's root")
        return (
            ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
            if who == "container"
            else []
        )
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


def _own_files(who: str, how: str) -> bool:
    """Return whether a sandbox is started by who may read all that this process may."""
    return os.geteuid() != 0 or (who, how) == ("root", "namespaces")


@cache
def python(who: str, how: str) -> str:
    """Return a Python that the user may run. One below root's own folder is for root alone, and
    for our namespaces.
    """
    if _own_files(who, how):
        return sys.executable
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if not Path(path).exists():
            continue
        done = subprocess.run(
            [*_as("user"), path, "-c", USABLE], capture_output=True, cwd="/", env={}
        )
        if done.returncode == 0:
            return path
    pytest.skip(
        f"another user may run neither {sys.executable} nor a Python 3.11 in /usr/bin: install one "
        "outside of folders that are root's alone"
    )


def _code(who: str, how: str) -> str:
    """Return the folder of the code that runs sandboxes: this clone's, or a copy where its user
    may not read that.
    """
    return str(ROOT) if _own_files(who, how) else _copied_code()


@cache
def _copied_code() -> str:
    folder = Path(tempfile.mkdtemp(prefix="siirl-sandbox-code-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(
        ROOT / "siirl_dask/rewards/code_execution", folder / "siirl_dask/rewards/code_execution"
    )
    shutil.copy(ROOT / "siirl_dask/errors.py", folder / "siirl_dask")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return str(folder)
