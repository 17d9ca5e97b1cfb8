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
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import cloudpickle

from siirl_dask.errors import ConfigError

Row = Mapping[str, Any]
"""The arguments of a reward function, by name."""
Outcome = tuple[Any, str | None]
"""The result of a reward function for one row, and None; or None, and the reason why there is none."""
Take = Callable[[Hashable, Outcome], bool]
"""Gets a row's key and its outcome, one call at a time; False: no other row is to be begun."""

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
        self._threads = ThreadPoolExecutor(processes, "siirl-reward")
        # One starts now, so that a function that cannot be loaded is known before the run; in a thread of the pool,
        # because a child dies with the thread that started it.
        self._children.put(self._threads.submit(_Child, self._payload).result())
        for _ in range(processes - 1):
            self._children.put(None)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in a thread of the pool."""
        return self._threads.submit(work)

    @contextmanager
    def child(self) -> Iterator[_Child]:
        """Lend a child that has nothing to do; inside a thread of the pool there is always one."""
        child = self._children.get()
        try:
            child = child or _Child(self._payload)
            yield child
        finally:
            self._children.put(child if child is not None and child.alive else None)

    def close(self) -> None:
        """Kill the children."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self._processes):
            child = self._children.get()
            if child is not None:
                child.close()


class PoolCalls:
    """Calls of a pool's function for rows that come one after the other, each of at most ``timeout`` seconds.

    ``take`` gets the outcomes.
    """

    def __init__(self, pool: Pool, timeout: float | None, take: Take) -> None:
        self._pool = pool
        self._timeout = timeout
        self._take = take
        self._calls: list[Future[None]] = []
        self._busy: set[_Child] = set()
        self._lock = Lock()
        self._stopped = False

    def add(self, key: Hashable, row: Callable[[], Row]) -> None:
        """Call the function for a row, which ``row`` gives when it is its turn. Any thread may call this."""
        if not self._stopped:
            self._calls.append(self._pool.submit(partial(self._call, key, row)))

    def finish(self) -> None:
        """Wait for the calls of all rows."""
        for call in self._calls:
            call.result()

    def cancel(self) -> None:
        """Begin no other row, and kill the children that are at work."""
        with self._lock:
            self._stop()

    def _call(self, key: Hashable, row: Callable[[], Row]) -> None:
        if self._stopped:
            return
        with self._pool.child() as child:
            arguments = row()
            with self._lock:
                if self._stopped:
                    return
                self._busy.add(child)
            outcome = child.call(arguments, self._timeout)
            with self._lock:
                self._busy.discard(child)
                if not self._stopped and not self._take(key, outcome):
                    self._stop()

    def _stop(self) -> None:
        self._stopped = True
        for child in self._busy:
            child.kill()


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
