"""The sandbox runs a Python program that nobody has read: with limits, without network, in an empty folder.

Each program is a process of its own with a clean environment. The process confines itself: see sandboxed.py.
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
    """The limits of one program. ValueError unless each number is above 0."""

    seconds: float = 10.0
    """Seconds of wall-clock time, and of CPU time."""
    memory: int = 2**30
    """Bytes of address space."""
    file_size: int = 2**20
    """Most bytes of its output, of one file, and of all its files together."""
    isolate: bool = True
    """True cuts the program off from the network and from writing files but its own, and refuses to run it where the
    kernel does not allow that.
    """

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "file_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected more than 0")


def passes(code: str, test: str, limits: Limits) -> bool:
    """Return whether ``test``, run after ``code`` in the same module, comes to its end; leaving early is no pass."""
    token = secrets.token_hex(16)
    return _run({"code": code, "test": test, "token": token}, limits) == token.encode()


def output(code: str, stdin: str, limits: Limits) -> str | None:
    """Return the output of ``code``, run with ``stdin``; None when it fails, is too slow or prints too much."""
    printed = _run({"code": code, "stdin": stdin}, limits)
    return None if printed is None else printed.decode(errors="replace")


def _run(task: dict[str, str], limits: Limits) -> bytes | None:
    """Return the standard output; None when the program failed. ConfigError when it cannot be confined."""
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
    """Start the process that runs a program; on the way out, kill it with all that it started."""
    ended, held = os.pipe()  # the program's processes hold one side: the other one's end says that all are gone
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
