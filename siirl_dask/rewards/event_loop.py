"""Calls an async reward function on an event loop of its own thread, for rows that come one
after the other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

from siirl_dask.rewards.child_process import Outcome
from siirl_dask.rewards.process_pool import Row, Take
from siirl_dask.wording import exception_text_with_place

_Job = tuple[Hashable, Callable[[], Row]]
_PATIENCE = 2.0  # seconds for cancelled calls to end; one that goes on is left alone


class LoopCalls:
    """Calls of an async function, at most ``concurrency`` at a time, each of at most ``timeout``
    seconds.

    ``take`` gets the outcomes, in the loop's thread, which calls ``bind`` first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout: float | None,
        concurrency: int,
        take: Take,
        bind: Callable[[], None],
    ) -> None:
        self._function = function
        self._timeout = timeout
        self._take = take
        self._bind = bind
        self._stopped = False
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._jobs = asyncio.Queue[_Job | None]()
        self._free = asyncio.Semaphore(concurrency)
        self._tasks = set[asyncio.Task[None]]()
        # Not of a pool: the interpreter would wait at its end for a function that never returns.
        self._thread = Thread(target=self._run, name="siirl-reward", daemon=True)
        self._thread.start()

    def add(self, key: Hashable, row: Callable[[], Row]) -> None:
        """Call the function for a row, which ``row`` gives when it is its turn. Any thread may
        call this.
        """
        self._call_soon(partial(self._jobs.put_nowait, (key, row)))

    def finish(self) -> None:
        """Wait for the calls of all rows."""
        self._call_soon(partial(self._jobs.put_nowait, None))
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Begin no other row, and cancel the calls that are under way."""
        self._call_soon(self._stop)
        self._thread.join(_PATIENCE)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, by itself only after too many failures
            self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        try:
            self._bind()
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # it is raised in the thread that waits for the calls
            self._failure = error

    async def _serve(self) -> None:
        if self._stopped:
            return
        dispatching = asyncio.create_task(self._dispatch())
        self._tasks.add(dispatching)
        await asyncio.wait([dispatching])
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _dispatch(self) -> None:
        """Begin with a row whenever a call is free and a row is there, until no more come."""
        while True:
            await self._free.acquire()
            if (job := await self._jobs.get()) is None:
                return
            key, row = job
            self._tasks.add(asyncio.create_task(self._call(key, row)))

    async def _call(self, key: Hashable, row: Callable[[], Row]) -> None:
        try:
            outcome = await self._outcome(row())
            if not self._stopped and not self._take(key, outcome):
                self._stop()
        finally:
            self._free.release()

    def _stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    async def _outcome(self, row: Row) -> Outcome:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                result = self._function(**row)
                if inspect.isawaitable(result):
                    result = await result
                return result, None
        except asyncio.CancelledError as error:
            if self._stopped:
                raise
            return None, exception_text_with_place(error)
        except (Exception, SystemExit) as error:  # what a user's function raises is its row's
            if limit.expired():
                return None, f"took more than {self._timeout} s"
            return None, exception_text_with_place(error)
