"""A child process that answers one message after the other, and is killed with all that it started.

multiprocessing cannot do this: a Dask worker under a nanny is a daemon, which may not start such
children, and one process of a standard pool cannot be stopped alone. Children answer in JSON, not
pickle: they work on whatever a model wrote.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from siirl_dask.devices.cpus import unbind
from siirl_dask.errors import ConfigError

Outcome = tuple[Any, str | None]
"""A result, and None; or None, and the reason why there is none."""

_START_TIMEOUT = 120.0  # seconds to import what the child needs
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Child:
    """The parent's end of one child process. All but ``kill`` belongs to the thread that makes it.

    ``serve(file)`` is what the process runs: a module-level function, which begins with
    ``connect``. ``payload`` is the pickle of what it loads, ``what`` its name in the ConfigError of
    a child that cannot load it, ``longest`` the most bytes of an answer. A child dies with the
    thread that made it.
    """

    def __init__(
        self,
        serve: Callable[[int], None],
        payload: bytes,
        *,
        what: str,
        longest: int,
    ) -> None:
        self._longest = longest
        ours, theirs = socket.socketpair()
        with theirs:
            command = (
                f"from {serve.__module__} import {serve.__name__} as serve; "
                f"serve({theirs.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts can be killed with it
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
        unbind(self._process.pid)
        self._connection = Connection(ours.detach())
        self._lock = Lock()
        self.alive = True
        _, failure = self._exchange(payload, _START_TIMEOUT)
        if failure is not None:
            self.close()
            raise ConfigError(f"{what} cannot be loaded in a process of its own: {failure}")

    def call(self, request: object, timeout: float | None) -> Outcome:
        """Return the child's outcome for one request. A child that gives none within ``timeout``
        seconds is killed.
        """
        return self._exchange(pickle.dumps(request), timeout)

    def kill(self) -> None:
        """Kill the process and all that it started. Any thread may call it; ``call`` then
        returns a failure.
        """
        with self._lock:
            self.alive = False
            # not reaped yet: its number cannot be another process's
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def close(self) -> None:
        """Kill the process and close the connection to it."""
        self.kill()
        self._connection.close()

    def _exchange(self, message: bytes, timeout: float | None) -> Outcome:
        try:
            self._connection.send_bytes(message)
            if not self._connection.poll(timeout):
                self.close()
                return None, f"took more than {timeout:g} s"
            result, failure = json.loads(self._connection.recv_bytes(self._longest))
        except (EOFError, OSError):
            self.close()
            return None, f"the process died (exit code {self._process.returncode})"
        except (ValueError, TypeError, RecursionError) as error:
            self.close()
            return None, f"the process gave no usable answer: {error}"
        return result, failure


class Requests:
    """The child's end: its requests, one after the other, and the way back for their outcomes."""

    def __init__(self, file: int) -> None:
        self._connection = Connection(file)

    def load(self, prepare: Callable[[Any], None] = lambda loaded: None) -> Any:
        """Return what the parent sent to be loaded; None if it cannot be, and the parent is sent why.

        ``prepare`` is called with it before the parent hears that it is loaded.
        """
        try:
            loaded = pickle.loads(self._connection.recv_bytes())
            prepare(loaded)
        except Exception as error:  # whatever a user's module raises while it is imported
            self.answer(json.dumps((None, f"{type(error).__name__}: {error}")).encode())
            return None
        self.answer(b"[null, null]")
        return loaded

    def __iter__(self) -> Iterator[Any]:
        """Yield requests until the parent is gone. One is to be answered before the next."""
        with suppress(EOFError, OSError):
            while True:
                yield pickle.loads(self._connection.recv_bytes())

    def answer(self, outcome: bytes) -> None:
        """Send the JSON of an outcome."""
        self._connection.send_bytes(outcome)


def connect(file: int) -> Requests:
    """Make this process the child of whoever holds the other end of ``file``, with which it
    dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        # Even inside a function that never returns. Elsewhere it ends with its next request.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _end_with_session(file)
    return Requests(file)


def _end_with_session(file: int) -> None:
    """Start a process that kills all of this session when this process has ended, also by a signal.

    Where a worker is killed, the kernel kills its children with it, and nobody what these have
    started.
    """
    try:
        watched = os.pidfd_open(os.getpid())
    except OSError:  # a kernel without them
        return
    if child := os.fork():
        os.close(watched)
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)  # the process that stays is no child of this one, which may wait for its own
    os.close(file)  # else the worker would not hear of the end of this process
    select.select([watched], [], [])
    os.killpg(0, signal.SIGKILL)
