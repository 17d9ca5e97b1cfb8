"""The sandbox runs a Python program that nobody has read: with limits, without network, in an empty
folder.

What a program should have returned or printed never enters its sandbox: its input goes in, data
comes out and is compared outside. Each process confines itself; see inside/.
"""

from __future__ import annotations

import json
import secrets
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.code_execution import places
from siirl_dask.rewards.code_execution.inside.main import FAILED, PASSED, REFUSED, UNUSABLE
from siirl_dask.rewards.code_execution.inside.namespaces import FOLDER
from siirl_dask.rewards.code_execution.processes import Flow, SandboxProcess, carry

_LONGEST_REASON = 2**16  # bytes
# a message may have this part of the memory: what it is decoded to takes several times its bytes
_MEMORY_OF_MESSAGE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The limits of one program. ValueError unless each number is above 0, ConfigError for any
    other isolation.
    """

    seconds: float = 10.0
    """Seconds of wall-clock time, and of CPU time."""
    memory: int = 2**30
    """Bytes of address space."""
    file_size: int = 2**20
    """Most bytes of its output, of one file, and of all its files together."""
    isolate: bool | str = True
    """``True``, or ``namespaces``, hides from the program the network, other processes and all
    files but ``readable`` and Python's, and refuses to run it where the kernel does not allow that.
    ``bubblewrap`` and ``runsc`` have that program do it. ``False``: none does.
    """
    readable: tuple[str, ...] = ()
    """Files and folders that an isolated program can read, beside the system's libraries and
    Python's."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "file_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected more than 0")
        if self.isolate not in places.ISOLATIONS:
            names = ", ".join(map(str, places.ISOLATIONS))
            raise ConfigError(f"isolate={self.isolate!r}: expected one of {names}")


def passes(code: str, test: str, limits: SandboxLimits) -> bool:
    """Return whether ``test`` comes to its end, run in one sandbox with the functions of ``code``
    in another.

    The program's functions get data and return data, so the program cannot reach the test.
    ValueError when the test passes them anything else.
    """
    end = time.monotonic() + limits.seconds
    size = limits.memory // _MEMORY_OF_MESSAGE
    with ExitStack() as stack:
        tasks: tuple[dict[str, object], ...] = (
            {"kind": "solution", "code": code},
            {"kind": "examination", "test": test},
        )
        program, examination = (stack.enter_context(_started(limits)) for _ in tasks)
        into = [_header(task | {"message_size": size}, limits) for task in tasks]
        answers = Flow(source=program.stdout, sink=examination.stdin, waiting=into[1])
        asked = Flow(source=examination.stdout, sink=program.stdin, waiting=into[0])
        reasons = [
            Flow(source=process.stderr, most=_LONGEST_REASON) for process in (program, examination)
        ]
        flows: dict[Flow, SandboxProcess | None] = {
            asked: program,
            answers: examination,
            reasons[0]: None,
            reasons[1]: None,
        }
        if carry(flows, [asked, reasons[1]], end) and examination.exit_code(end) == PASSED:
            return True
        # The program may still run; it ends when it reads the end of its input, and is heard for
        # why it was not run.
        ended = carry(flows, list(flows), end)
        for process, reason in zip((program, examination), reasons, strict=True):
            _check(process.exit_code(end) if ended else None, reason)
        return False


def passes_together(code: str, test: str, limits: SandboxLimits) -> bool:
    """Return whether ``test``, run after ``code`` in the same module, comes to its end; leaving
    early is no pass.

    The program shares the test's memory: one that looks for it can print what says that the test
    passed.
    """
    token = secrets.token_hex(16)
    return (
        _run({"kind": "together", "code": code, "test": test, "token": token}, b"", limits)
        == token.encode()
    )


def output(code: str, stdin: str, limits: SandboxLimits) -> str | None:
    """Return the output of ``code``, run with ``stdin``; None when it fails, is too slow or
    prints too much.
    """
    printed = _run({"kind": "program", "code": code}, stdin.encode(), limits)
    if printed is None:
        return None
    return printed.decode(errors="replace")


def _run(task: dict[str, object], stdin: bytes, limits: SandboxLimits) -> bytes | None:
    """Return the standard output of one process; None when it failed. ConfigError when it cannot
    be confined.
    """
    end = time.monotonic() + limits.seconds
    with _started(limits) as process:
        given = Flow(sink=process.stdin, waiting=_header(task, limits) + stdin)
        printed = Flow(source=process.stdout, most=limits.file_size)
        reason = Flow(source=process.stderr, most=_LONGEST_REASON)
        ended = carry({given: process, printed: None, reason: None}, [printed, reason], end)
        code = process.exit_code(end) if ended else None
        _check(code, reason)
        if code != PASSED:
            return None
        return bytes(printed.waiting)


@contextmanager
def _started(limits: SandboxLimits) -> Iterator[SandboxProcess]:
    with tempfile.TemporaryDirectory(prefix="siirl-code-") as folder:
        readable = places.readable_places(limits.readable)
        command, user = places.sandbox_command(limits.isolate, readable, limits.file_size, folder)
        home = FOLDER
        if limits.isolate in (False, "runsc"):  # runsc itself writes there
            home = folder
        with SandboxProcess(command, folder, home, user) as process:
            yield process


def _header(task: dict[str, object], limits: SandboxLimits) -> bytearray:
    confinement: dict[str, object] = {"isolate": limits.isolate, "user": None}
    if limits.isolate in (True, "namespaces"):
        confinement = {"isolate": "namespaces", "user": places.program_user()}
    text = json.dumps(
        task | asdict(limits) | confinement | {"readable": places.readable_places(limits.readable)}
    ).encode()
    return bytearray(struct.pack("<Q", len(text)) + text)


def _check(code: int | None, reason: Flow) -> None:
    """Raise what an exit code says, beside that the code failed; None is that of a process that
    had no time to end.
    """
    why = bytes(reason.waiting).decode(errors="replace").strip()
    if code == UNUSABLE:
        raise ValueError(
            f"a test cannot be run apart from the program: {why}; mend it, or pass forgeable=True, "
            "which runs both in "
            "one process, where a program that looks for it can pass without being right"
        )
    if code in (None, PASSED, FAILED):
        return
    closed = places.closed_folder()
    if "Permission denied" in why and places.program_user() is not None and closed is not None:
        raise ConfigError(
            f"code cannot be confined here: {why}; root's programs run as another user, who may "
            f"not enter {closed}: install Python and siirl_dask in a folder that all users may read"
        )
    if code == REFUSED:
        raise ConfigError(
            f"code cannot be confined here: {why}; allow unprivileged user namespaces (in a "
            "container, a seccomp "
            "profile that does), or pass isolate=False, which leaves it network and files"
        )
    raise ConfigError(
        f"the process that was to run the code broke with exit code {code}: "
        f"{why or 'it said nothing'}"
    )
