"""A pool of child processes that call a reward function: a row that hangs or crashes takes only
its own child down.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from siirl_dask.errors import ConfigError
from siirl_dask.pickling import dumps
from siirl_dask.rewards.child_process import Child, Outcome, connect
from siirl_dask.rewards.numbers import as_float
from siirl_dask.wording import exception_text_with_place, value_text

Row = Mapping[str, Any]
"""The arguments of a reward function, by name."""
Take = Callable[[Hashable, Outcome], bool]
"""Gets a row's key and its outcome, one call at a time; False: no other row is to be begun."""

_LONGEST = 2**20  # bytes of an answer: a few numbers by name


def call_reward(function: Callable[..., Any], row: Row) -> Outcome:
    """Call a reward function with a row's columns by name; a coroutine that it returns is run to
    its end.
    """
    try:
        result = function(**row)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return result, None
    # whatever a user's function raises is reported with its row, and exit() ends no worker
    except (Exception, SystemExit) as error:
        return None, exception_text_with_place(error)


class Pool:
    """Calls one function in ``processes`` children. ConfigError when the function cannot be sent
    to them.
    """

    def __init__(self, function: Callable[..., Any], processes: int) -> None:
        try:
            self._payload = dumps(function)
        except Exception as error:  # pickle raises anything from TypeError to RecursionError
            raise ConfigError(
                f"the reward {function!r} cannot be sent to other processes: {error}"
            ) from error
        # None: one that is not started yet
        self._children: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self._processes = processes
        self._threads = ThreadPoolExecutor(processes, "siirl-reward")
        # One starts now, so that a function that cannot be loaded is known before the run; in a
        # thread of the pool, because a child dies with the thread that started it.
        self._children.put(self._threads.submit(self._start).result())
        for _ in range(processes - 1):
            self._children.put(None)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in a thread of the pool."""
        return self._threads.submit(work)

    @contextmanager
    def child(self) -> Iterator[Child]:
        """Lend a child that has nothing to do; inside a thread of the pool there is always one."""
        child = self._children.get()
        try:
            if child is None:
                child = self._start()
            yield child
        finally:
            self._children.put(child if child is not None and child.alive else None)

    def _start(self) -> Child:
        return Child(serve, self._payload, what="the reward function", longest=_LONGEST)

    def close(self) -> None:
        """Kill the children."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self._processes):
            child = self._children.get()
            if child is not None:
                child.close()


class PoolCalls:
    """Calls of a pool's function for rows that come one after the other, each of at most
    ``timeout`` seconds.

    ``take`` gets the outcomes.
    """

    def __init__(self, pool: Pool, timeout: float | None, take: Take) -> None:
        self._pool = pool
        self._timeout = timeout
        self._take = take
        self._calls: list[Future[None]] = []
        self._busy: set[Child] = set()
        self._lock = Lock()
        self._stopped = False

    def add(self, key: Hashable, row: Callable[[], Row]) -> None:
        """Call the function for a row, which ``row`` gives when it is its turn. Any thread may
        call this.
        """
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
            outcome = child.call(dict(arguments), self._timeout)
            with self._lock:
                self._busy.discard(child)
                if not self._stopped and not self._take(key, outcome):
                    self._stop()

    def _stop(self) -> None:
        self._stopped = True
        for child in self._busy:
            child.kill()


def serve(file: int) -> None:
    """Run a child: load the function, then answer for one row after the other until the parent
    is gone.
    """
    requests = connect(file)
    if (function := requests.load()) is not None:
        for row in requests:
            requests.answer(_as_json(call_reward(function, row)))


def _as_json(outcome: Outcome) -> bytes:
    try:
        return json.dumps(outcome, default=as_float).encode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return json.dumps((None, f"gave {value_text(outcome[0])}: expected a number")).encode()
