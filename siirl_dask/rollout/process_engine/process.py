"""The worker's end of its engine's process: starts it, sends it commands, and ends it with all that
it has started.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from threading import Thread
from typing import Any

from siirl_dask.context import Device
from siirl_dask.errors import PeerError
from siirl_dask.rollout.process_engine.errors_as_data import read_error
from siirl_dask.rollout.process_engine.frames import (
    ABORT,
    ANSWER,
    DONE,
    FAILED,
    MessageSocket,
    ProcessLostError,
)
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.rollout")
_CHILD = "siirl_dask.rollout.process_engine.child"
_PATIENCE = 5.0  # seconds for a process that is ending to be gone
_LOOK_AGAIN = 0.02
_CHECK_EVERY = 0.05  # seconds; an engine that waits for other ranks asks ten times a second
_LINES = 12
"""Last lines of a process's output that an error shows."""
_LONGEST_LINE = 2**12
Answers = Callable[[str, Any], Any]
"""``answers(name, value)`` is called with each message of the process while it works at a command, but
for reports of progress; a question gets what it returns."""
_QUESTIONS = ("next", "ended", "arrived", "load")


def _no_answers(name: str, value: Any) -> Any:
    raise PeerError(f"the engine's process sent {name!r}: expected no such message")


class EngineProcess:
    """A process for one engine. It ends with this object's ``end``, with this process, and by
    itself; its folder of temporary files goes with it.
    """

    def __init__(self, device: Device, defaults: Mapping[str, str], *, with_secrets: bool) -> None:
        """``defaults`` are environment variables of the engine's; one that is set here stays.
        ``with_secrets`` lets the process have those that hold secrets, by name or form.
        """
        self.holds: object = None
        """Weights that it has; None: those of the model's folder."""
        self._device = device
        self._ended_here = False
        self._stages: list[ExitStack] = []
        self._words: deque[str] = deque(maxlen=_LINES)
        self._folder = tempfile.mkdtemp(prefix="siirl-engine-")
        ours, theirs = socket.socketpair()
        self._socket = MessageSocket(ours)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _CHILD, str(theirs.fileno()), self._folder],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,  # nothing is written there: its end is the child's
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**defaults, **_environment(self._folder, with_secrets=with_secrets)},
                )
        except BaseException:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._reader = Thread(target=self._forward, name="siirl-engine-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def is_running(self) -> bool:
        """Return whether the process has not ended. Where the system can, it is not reaped: its
        number stays that of its group, which ``end`` kills.
        """
        if self._process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):
            return self._process.poll() is None
        look = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, look) is None

    def command(
        self,
        name: str,
        value: Any = None,
        *,
        file: int | None = None,
        answers: Answers = _no_answers,
        check: Callable[[], object] | None = None,
    ) -> Any:
        """Have the process carry out a command, and return its result.

        What the engine raises is raised here, and what ``answers`` raises, after the engine has
        stopped. ProcessLostError where the process has ended; then, and where this call is
        interrupted in the middle, it is killed. ``check`` is called now and then while the process
        says nothing: what it raises interrupts the call.
        """
        outer = len(self._stages)  # of a command that waits for this one
        try:
            self._socket.send(name, value, file)
            result, error = self._until_done(answers, check)
        except ProcessLostError:
            self._await_own_end()  # before it is killed
            self.end()
            raise
        except BaseException:
            self.end()
            raise
        finally:
            while len(self._stages) > outer:
                self._stages.pop().close()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Kill the process and all that it has started."""
        if self.is_running():
            self._ended_here = True
        # not reaped yet: its number cannot be another process's
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._socket.close()
        if self._reader.is_alive():
            self._reader.join(_PATIENCE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def how_it_ended(self) -> str:
        """Return how a process that is gone came to its end, and the last that it said, for errors."""
        how = "was ended by its worker"
        if not self._ended_here:
            how = _how(self._process.returncode)
        words = "\n".join(self._words)
        if not words:
            return f"{how}, and said nothing"
        return f"{how}; the last that it said:\n{words}"

    def _until_done(
        self, answers: Answers, check: Callable[[], object] | None
    ) -> tuple[Any, Exception | None]:
        """Return the result of a command, or what was raised in it."""
        failure: Exception | None = None
        try:
            while True:
                while check is not None and not self._socket.is_readable(_CHECK_EVERY):
                    check()
                message = self._socket.receive()
                if message.name == DONE:
                    return message.value, failure
                if message.name == FAILED:
                    return None, read_error(message.value) if failure is None else failure
                if self._reported(message.name, message.value):
                    continue
                asks = message.name in _QUESTIONS
                if failure is None:
                    try:
                        answer = answers(message.name, message.value)
                        if asks:
                            self._socket.send(ANSWER, answer)
                    except ProcessLostError:
                        raise
                    # whatever the worker's queue raises, and an answer that cannot be sent
                    except Exception as error:
                        failure = error
                if asks and failure is not None:
                    self._socket.send(ABORT)
        except ProcessLostError:
            if failure is not None:
                raise failure from None
            raise

    def _await_own_end(self) -> None:
        """Wait some seconds for the process to end by itself."""
        until = time.monotonic() + _PATIENCE
        while self.is_running() and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN)

    def _reported(self, name: str, value: Any) -> bool:
        """Pass on a report of progress; return whether the message was one."""
        match name, value:
            case "progress", None:
                self._device.progress()
            case "cache", [float(used), int(waiting)]:
                self._device.engine_cache(used, waiting)
            case "stage", str(stage):
                self._begin_stage(self._device.stage(stage))
            case "waiting", None:
                self._begin_stage(self._device.waiting())
            case "stage ended", None if self._stages:
                self._stages.pop().close()
            case _:
                return False
        return True

    def _begin_stage(self, stage: AbstractContextManager[object]) -> None:
        begun = ExitStack()
        begun.enter_context(stage)
        self._stages.append(begun)

    def _forward(self) -> None:
        """Pass on what the process writes, and keep its last lines."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while line := output.readline(_LONGEST_LINE):
                text = line.decode(errors="replace")
                self._words.append(text.rstrip())
                # a pipe that nobody empties would hold the process up
                with suppress(OSError, ValueError):
                    sys.stderr.write(text)


def _how(code: int | None) -> str:
    """Return what a return code of ``Popen`` means."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _environment(folder: str, *, with_secrets: bool) -> dict[str, str]:
    """Return the environment of the process."""
    own = {
        name: value
        for name, value in os.environ.items()
        if with_secrets or redacted(f"{name}={value}") == f"{name}={value}"
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**own, "PYTHONPATH": path, "TMPDIR": folder}
