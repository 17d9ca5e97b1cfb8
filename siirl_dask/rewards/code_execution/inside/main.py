"""The process that runs one program or one test: it confines itself, and a child of it does the
rest.

The process reads its task from standard input: eight bytes of length, then JSON. What follows is
the program's own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from math import ceil
from typing import Any

from siirl_dask.rewards.code_execution.inside.errors import UnusableTestError
from siirl_dask.rewards.code_execution.inside.linux import call, die_with_parent, prctl
from siirl_dask.rewards.code_execution.inside.namespaces import become, leave_namespaces
from siirl_dask.rewards.code_execution.inside.seccomp import install_filter

PASSED = 0
UNUSABLE = 96
REFUSED = 97
FAILED = 98
"""Exit codes: the code came to its end; a test cannot be run apart from the program; the code could
not be confined and was not run; it failed. For the second and third, standard error says why."""

_NO_NEW_PRIVS = 38  # linux/prctl.h
_SET_DUMPABLE = 4
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h
_OPEN_FILES = 64
_TASKS = 64
_NO_CORE = 1  # 0 would still start the program that /proc/sys/kernel/core_pattern names

Task = dict[str, Any]
_KINDS = {
    "program": ("program", "run_program"),
    "solution": ("serving", "serve_solution"),
    "examination": ("examination", "examine"),
    "together": ("program", "run_together"),
}
"""Module and function of each kind of task. Only one is imported: a program ends in less time
than that takes."""


def main() -> None:
    """Confine this process as its task says, run the task in a child, and end with the child's
    exit code.
    """
    # as the first process of a namespace it is then out of a child's reach
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    task = json.loads(_read(struct.unpack("<Q", _read(8))[0]))
    module, function = _KINDS[task["kind"]]
    run = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    if task["isolate"] == "namespaces":
        _or_refuse(lambda: leave_namespaces(task["readable"], task["file_size"], task["user"]))
    confined, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            os.close(confined)
            _or_refuse(lambda: _confine(task))
            os.write(tell, b"!")
            os.close(tell)
            code = _run(run, task)
        finally:
            os._exit(code)
    os.close(tell)
    was_run = os.read(confined, 1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if not was_run:
        os._exit(REFUSED)
    if code == 0:
        os._exit(PASSED)
    if code == UNUSABLE and task["kind"] == "examination":
        os._exit(UNUSABLE)
    os._exit(FAILED)


def _run(run: Callable[[Task], None], task: Task) -> int:
    nothing = os.open(os.devnull, os.O_WRONLY)
    why = os.dup(2)
    os.dup2(nothing, 2)
    if task["kind"] != "examination":
        os.close(why)
    try:
        run(task)
    except UnusableTestError as error:
        os.write(why, str(error).encode())
        return UNUSABLE
    except BaseException:  # also SystemExit: a program that exits has not passed
        return FAILED
    return PASSED


def _read(size: int) -> bytes:
    """Return the next bytes of standard input, and leave what follows them there."""
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            os._exit(FAILED)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _or_refuse(step: Callable[[], None]) -> None:
    try:
        step()
    except (OSError, ValueError) as error:
        os.write(2, str(error).encode())
        os._exit(REFUSED)


def _confine(task: Task) -> None:
    """Set limits that cannot be raised again, drop root and capabilities, and forbid new processes
    and all that reaches out of this one; threads are allowed.
    """
    limits = {
        resource.RLIMIT_CPU: ceil(task["seconds"]),
        resource.RLIMIT_AS: task["memory"],
        resource.RLIMIT_FSIZE: task["file_size"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: _NO_CORE,
    }
    if task["isolate"]:  # elsewhere it would count all processes of the user
        limits[resource.RLIMIT_NPROC] = _TASKS
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))
    if task["user"] is not None and os.getuid() == 0:
        become(task["user"])
    if sys.platform == "linux":
        die_with_parent()
        prctl(_SET_DUMPABLE, 0)
        prctl(_NO_NEW_PRIVS, 1)
        call("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
        install_filter(confined=bool(task["isolate"]))
