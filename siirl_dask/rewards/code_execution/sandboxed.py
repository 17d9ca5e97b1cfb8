"""The process that runs one program of a model. sandbox.py starts this file as a script.

The outer process leaves the machine's namespaces; its child sets limits, drops capabilities, forbids new processes and
runs the program. It needs the standard library and Linux's own calls alone, which it makes through ctypes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

REFUSED = 97
"""Exit code of a program that could not be confined and was not run; standard output then says why."""
FAILED = 98
"""Exit code of a program that failed."""

# Numbers of linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h and linux/bpf_common.h, which ctypes lacks.

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_PDEATHSIG, _SECCOMP, _NO_NEW_PRIVS, _FILTER = 1, 22, 38, 2
_CAPABILITY_VERSION = 0x20080522
_CLONE_THREAD = 0x10000
_OPEN_FILES, _TASKS = 64, 64

_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_CALLS = {  # machine: its number, clone, clone3; and forbidden: fork, vfork, unshare, setns, setpgid, setsid, prctl
    "x86_64": (0xC000003E, 56, 435, (57, 58, 272, 308, 109, 112, 157)),
    "aarch64": (0xC00000B7, 220, 435, (97, 268, 154, 157, 167)),
}


def main() -> None:
    """Confine this process as the task on standard input says, and run the task's program in a child."""
    _die_with_parent()
    task = json.load(sys.stdin)
    stdin = _file_of(task.get("stdin", ""))
    if task["isolate"]:
        _or_refuse(_leave, task)
    confined, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(confined)
            _or_refuse(_confine, task)
            os.write(tell, b"!")
            os.close(tell)
            os.dup2(stdin, 0)
            run_test(task) if "test" in task else run_program(task)
        finally:
            os._exit(FAILED)
    os.close(tell)
    was_run = os.read(confined, 1)
    _, status = os.waitpid(child, 0)
    os._exit(REFUSED if not was_run else FAILED if status else 0)


def run_test(task: dict[str, Any]) -> None:
    """Run the program, not as the main module, then its test; write the token when the test comes to its end."""
    answer, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    names = _module("solution")
    try:
        exec(compile(task["code"], "solution", "exec"), names)
        exec(compile(task["test"], "test", "exec"), names)
    except BaseException:  # also SystemExit: a program that exits has not passed
        os._exit(FAILED)
    os.write(answer, task["token"].encode())
    os._exit(0)


def run_program(task: dict[str, Any]) -> None:
    """Run the program as the main module, with the task's standard input."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    try:
        exec(compile(task["code"], "program", "exec"), _module("__main__"))
    except SystemExit as end:
        if end.code not in (None, 0):
            os._exit(FAILED)
    sys.stdout.flush()
    os._exit(0)


def _module(name: str) -> dict[str, Any]:
    """Return the namespace of a new module; it is in sys.modules, where dataclasses look for it."""
    sys.modules[name] = ModuleType(name)
    return vars(sys.modules[name])


def _file_of(text: str) -> int:
    """Return an open file that holds ``text`` and has no name. A pipe would not do: it holds 64 KiB."""
    file = os.open("stdin", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink("stdin")  # noqa: PTH108
    with open(file, "wb", closefd=False) as stream:
        stream.write(text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _or_refuse(step: Any, task: dict[str, Any]) -> None:
    try:
        step(task)
    except (OSError, ValueError) as error:
        os.write(1, str(error).encode())
        os._exit(REFUSED)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _call("prctl", _PDEATHSIG, signal.SIGKILL)


def _leave(task: dict[str, Any]) -> None:
    """Leave the namespaces of the machine: no network, no other processes, and every file read-only but for an empty
    folder in memory.
    """
    user, group, folder = os.getuid(), os.getgid(), str(Path.cwd()).encode()
    _call("unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC)
    for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        Path(f"/proc/self/{name}").write_text(text)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    read_only = struct.pack("=4Q", _READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only))
    for place in (b"/proc", folder):  # /proc would show other processes' environment
        options = f"size={task['file_size']},mode=700".encode()
        _call("mount", b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(folder)


def _confine(task: dict[str, Any]) -> None:
    """Set limits that cannot be raised again, drop capabilities, and forbid new processes; threads are allowed."""
    limits = {
        resource.RLIMIT_CPU: ceil(task["seconds"]),
        resource.RLIMIT_AS: task["memory"],
        resource.RLIMIT_FSIZE: task["file_size"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if task["isolate"]:  # elsewhere it would count all processes of the user
        limits[resource.RLIMIT_NPROC] = _TASKS
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        _die_with_parent()
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
        _forbid_processes()


def _forbid_processes() -> None:
    """Install a seccomp filter, so that killing the program's process group leaves nothing over. Machines whose call
    numbers are not listed get none.
    """
    if os.uname().machine not in _CALLS:
        return
    machine, clone, clone3, forbidden = _CALLS[os.uname().machine]
    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0)]
    rules += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]  # x86_64 has a second set of numbers
    for number in forbidden:
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    rules += [(_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _ENOSYS)]  # a filter cannot see its flags; clone's it can
    rules += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _EPERM)]
    rules += [(_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    _call("prctl", _SECCOMP, _FILTER, struct.pack("@HP", len(rules), ctypes.addressof(code)))


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library, with each int as a long. OSError when it fails or does not exist."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(f"{sys.platform} has no {name}()")
    if function(*(ctypes.c_long(item) if isinstance(item, int) else item for item in arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
