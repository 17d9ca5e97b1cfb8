"""Runs a Python program that nobody has read: without network, with limits, for a limited time, in an empty folder.

Each program is a process of its own with a clean environment; sandboxed.py says what confines it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.code_execution import sandboxed


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    seconds: float = 10.0
    """Of wall-clock time, and of CPU time."""
    memory: int = 2**30
    """Bytes of address space."""
    file_size: int = 2**20
    """Bytes of what it prints, of a file, and of all its files together."""
    isolate: bool = True
    """Cut it off from the network and from all files but its own; where the kernel does not allow that, refuse to run
    it.
    """

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "file_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected more than 0")


def passes(code: str, test: str, limits: Limits) -> bool:
    """Whether ``test``, run after ``code`` in the same module, comes to its end; leaving early is no pass."""
    token = secrets.token_hex(16)
    return _run({"code": code, "test": test, "token": token}, limits) == token.encode()


def output(code: str, stdin: str, limits: Limits) -> str | None:
    """What ``code``, run as a program with ``stdin``, prints; None when it fails, is too slow or prints too much."""
    printed = _run({"code": code, "stdin": stdin}, limits)
    return None if printed is None else printed.decode(errors="replace")


def _run(task: dict[str, str], limits: Limits) -> bytes | None:
    """Standard output; None when the program failed. ConfigError when it cannot be confined."""
    with tempfile.TemporaryDirectory(prefix="siirl-code-") as folder, tempfile.TemporaryFile() as printed:
        late = False
        with _started(folder, printed) as process:
            try:
                process.communicate(json.dumps(task | asdict(limits)).encode(), timeout=limits.seconds)
            except subprocess.TimeoutExpired:
                late = True
        printed.seek(0)
        if late or process.returncode == sandboxed.FAILED:
            return None
        if process.returncode == sandboxed.REFUSED:
            raise ConfigError(
                f"code cannot be confined here: {printed.read().decode()}; allow unprivileged user namespaces (in a "
                "container, a seccomp profile that does), or pass isolate=False, which leaves it network and files"
            )
        if process.returncode:
            raise RuntimeError(f"the process that was to run the code broke with exit code {process.returncode}")
        return printed.read()


@contextmanager
def _started(folder: str, printed: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process that runs a program; on the way out it is gone, with all that it started."""
    ended, held = os.pipe()  # its end says that nobody holds the other side any more
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", sandboxed.__file__],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            pass_fds=[held],
            start_new_session=True,
        )
    except BaseException:
        os.close(ended)
        raise
    finally:
        os.close(held)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        while os.read(ended, 4096):
            pass
        os.close(ended)
