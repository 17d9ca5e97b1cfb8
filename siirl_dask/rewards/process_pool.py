"""A pool of processes that score rows, so that one that hangs or dies takes only its row with it.

Not multiprocessing's: a Dask worker under a nanny is a daemon, which may start no such children, and a process of a
standard pool cannot be stopped alone. What a child says is read as JSON: it works on whatever a model wrote.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from siirl_dask.errors import ConfigError

_START_TIMEOUT = 120.0  # seconds to import what the function needs
_LONGEST = 2**20  # bytes of an answer: a few numbers by name
_PR_SET_PDEATHSIG = 1


class Pool:
    """``processes`` children, each with the function. ConfigError when it cannot be sent to them."""

    def __init__(self, function: Callable[..., Any], processes: int) -> None:
        try:
            self._payload = cloudpickle.dumps(function)
        except Exception as error:  # pickle raises anything from TypeError to RecursionError
            raise ConfigError(f"the reward {function!r} cannot be sent to other processes: {error}") from error
        self._children: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        self._processes = processes
        self._threads = ThreadPoolExecutor(processes, "siirl-reward")
        # one now, so that a function that cannot be loaded is known before the run; by a thread that lives as long as
        # the pool, because a child dies with the thread that started it
        self._children.put(self._threads.submit(_Child, self._payload).result())
        for _ in range(processes - 1):
            self._children.put(None)

    def call(self, rows: Sequence[Mapping[str, Any]], timeout: float | None) -> list[Outcome]:
        """The function's outcome for each row, in order."""
        return list(self._threads.map(lambda row: self._one(row, timeout), rows))

    def close(self) -> None:
        """Kill the children."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self._processes):
            child = self._children.get()
            if child is not None:
                child.kill()

    def _one(self, row: Mapping[str, Any], timeout: float | None) -> Outcome:
        child: _Child | None = self._children.get()
        try:
            if child is None:
                child = _Child(self._payload)
            outcome = child.call(row, timeout)
            if not child.alive:
                child = None
            return outcome
        finally:
            self._children.put(child)


class _Child:
    def __init__(self, payload: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = f"from siirl_dask.rewards.process_pool import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts can be killed with it
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._connection = Connection(ours.detach())
        self.alive = True
        self._connection.send_bytes(payload)
        failure = self._answer(_START_TIMEOUT, "importing it")[1]
        if failure is not None:
            self.kill()
            raise ConfigError(f"the reward function cannot be loaded in a process of its own: {failure}")

    def call(self, row: Mapping[str, Any], timeout: float | None) -> Outcome:
        self._connection.send_bytes(pickle.dumps(dict(row)))
        return self._answer(timeout, "it")

    def kill(self) -> None:
        self.alive = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _answer(self, timeout: float | None, what: str) -> Outcome:
        try:
            if not self._connection.poll(timeout):
                self.kill()
                return None, f"{what} took more than {timeout:g} s"
            given, failure = json.loads(self._connection.recv_bytes(_LONGEST))
        except (EOFError, OSError):
            self.kill()
            return None, f"the process died (exit code {self._process.returncode})"
        except ValueError as error:
            self.kill()
            return None, f"the process gave no usable answer: {error}"
        return given, failure


def serve(file: int) -> None:
    """What a child does: load the function, then answer for one row after the other until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _die_with_parent()
    connection = Connection(file)
    try:
        function: Callable[..., Any] | None = pickle.loads(connection.recv_bytes())
        answer: tuple[object, str | None] = (None, None)
    except Exception as error:  # whatever a user's module raises while it is imported
        answer, function = (None, f"{type(error).__name__}: {error}"), None
    connection.send_bytes(json.dumps(answer).encode())
    with suppress(EOFError, OSError):
        while function is not None:
            connection.send_bytes(_as_json(call_reward(function, pickle.loads(connection.recv_bytes()))))


def _as_json(outcome: Outcome) -> bytes:
    try:
        return json.dumps(outcome, default=float).encode()
    except (TypeError, ValueError):
        return json.dumps((None, f"gave {outcome[0]!r:.200}: expected a number")).encode()


def _die_with_parent() -> None:
    """Also where the function never comes back to Python: on Linux the kernel sees to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


Outcome = tuple[Any, str | None]
"""What a function returned, or what went wrong."""


def call_reward(function: Callable[..., Any], row: Mapping[str, Any]) -> Outcome:
    """Call it with the row's columns by name; to its end, if it is async."""
    try:
        given = function(**row)
        return (asyncio.run(given) if inspect.iscoroutine(given) else given), None
    except Exception as error:  # whatever a user's function raises is told with its row
        return None, describe_exception(error)


def describe_exception(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"
