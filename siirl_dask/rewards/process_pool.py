"""A pool of child processes that call a reward function: a row that hangs or crashes takes only its own child down.

multiprocessing cannot do this: a Dask worker under a nanny is a daemon, which may not start such children, and one
process of a standard pool cannot be stopped alone. Children answer in JSON, not pickle: they work on whatever a model
wrote.
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
from threading import Lock
from typing import Any

import cloudpickle

from siirl_dask.errors import ConfigError

Row = Mapping[str, Any]
"""The arguments of a reward function, by name."""
Outcome = tuple[Any, str | None]
"""The result of a reward function for one row, and None; or None, and the reason why there is none."""

_START_TIMEOUT = 120.0  # seconds to import what the function needs
_LONGEST = 2**20  # bytes of an answer: a few numbers by name
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def call_reward(function: Callable[..., Any], row: Row) -> Outcome:
    """Call a reward function with a row's columns by name; a coroutine that it returns is run to its end."""
    try:
        result = function(**row)
        return (asyncio.run(result) if inspect.iscoroutine(result) else result), None
    except Exception as error:  # whatever a user's function raises is reported with its row
        return None, describe_exception(error)


def describe_exception(error: Exception) -> str:
    """Return how an outcome words an exception."""
    return f"raised {type(error).__name__}: {error}"


class Pool:
    """Calls one function in ``processes`` children. ConfigError when the function cannot be sent to them."""

    def __init__(self, function: Callable[..., Any], processes: int) -> None:
        try:
            self._payload = cloudpickle.dumps(function)
        except Exception as error:  # pickle raises anything from TypeError to RecursionError
            raise ConfigError(f"the reward {function!r} cannot be sent to other processes: {error}") from error
        self._children: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()  # None: one that is not started yet
        self._processes = processes
        self._busy: set[_Child] = set()
        self._lock = Lock()
        self._stopped = False
        self._threads = ThreadPoolExecutor(processes, "siirl-reward")
        # One starts now, so that a function that cannot be loaded is known before the run; in a thread of the pool,
        # because a child dies with the thread that started it.
        self._children.put(self._threads.submit(_Child, self._payload).result())
        for _ in range(processes - 1):
            self._children.put(None)

    def call(self, rows: Sequence[Row], timeout: float | None, take: Callable[[int, Outcome], bool]) -> None:
        """Call the function for each row and pass ``take`` the row's index and its outcome, one call at a time.

        When ``take`` returns False, no other row is begun and the children that are at work are killed.
        """
        self._stopped = False
        list(self._threads.map(lambda index: self._call_one(index, rows[index], timeout, take), range(len(rows))))

    def close(self) -> None:
        """Kill the children."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self._processes):
            child = self._children.get()
            if child is not None:
                child.close()

    def _call_one(self, index: int, row: Row, timeout: float | None, take: Callable[[int, Outcome], bool]) -> None:
        if self._stopped:
            return
        child = self._children.get()
        try:
            child = child or _Child(self._payload)
            with self._lock:
                if self._stopped:
                    return
                self._busy.add(child)
            outcome = child.call(row, timeout)
            with self._lock:
                self._busy.remove(child)
                if not self._stopped and not take(index, outcome):
                    self._stopped = True
                    for other in self._busy:
                        other.kill()
        finally:
            self._children.put(child if child is not None and child.alive else None)


class _Child:
    """The parent's end of one child process. All but ``kill`` belongs to the thread that calls it."""

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
        self._lock = Lock()
        self.alive = True
        _, failure = self._exchange(payload, _START_TIMEOUT, "importing it")
        if failure is not None:
            self.close()
            raise ConfigError(f"the reward function cannot be loaded in a process of its own: {failure}")

    def call(self, row: Row, timeout: float | None) -> Outcome:
        """Return the function's outcome for one row. A child that gives none within ``timeout`` seconds is killed."""
        return self._exchange(pickle.dumps(dict(row)), timeout, "it")

    def kill(self) -> None:
        """Kill the process and all that it started. Any thread may call it; ``call`` then returns a failure."""
        with self._lock:
            self.alive = False
            if self._process.returncode is None:  # not reaped yet: its number cannot be another process's
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def close(self) -> None:
        """Kill the process and close the connection to it."""
        self.kill()
        self._connection.close()

    def _exchange(self, message: bytes, timeout: float | None, subject: str) -> Outcome:
        try:
            self._connection.send_bytes(message)
            if not self._connection.poll(timeout):
                self.close()
                return None, f"{subject} took more than {timeout:g} s"
            result, failure = json.loads(self._connection.recv_bytes(_LONGEST))
        except (EOFError, OSError):
            self.close()
            return None, f"the process died (exit code {self._process.returncode})"
        except ValueError as error:
            self.close()
            return None, f"the process gave no usable answer: {error}"
        return result, failure


def serve(file: int) -> None:
    """Run a child: load the function, then answer for one row after the other until the parent is gone."""
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
    """Have the kernel kill this process with its parent, even inside a function that never returns (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
