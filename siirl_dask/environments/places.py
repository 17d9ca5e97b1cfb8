"""The place of environments: a protocol for the worker itself and for processes of their own;
here the worker.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, Protocol, TypeVar

from siirl_dask.environments.answers import Refused, WrongAnswer
from siirl_dask.environments.protocol import Failure, Step
from siirl_dask.environments.room import Opened, Room, World
from siirl_dask.environments.shapes import UnknownShape, is_async
from siirl_dask.errors import UserError
from siirl_dask.wording import exception_text, without_addresses

_T = TypeVar("_T")


class CallFailed(UserError):
    """A call gave nothing; the text is the reason of the episode's failure."""


class EnvironmentHost(Protocol):
    """Where environments live and tools are called. All methods are called on one event loop;
    none raises.
    """

    async def open(
        self,
        episode: int,
        name: str,
        row: Mapping[str, Any],
        seed: int,
    ) -> Opened | Failure: ...

    async def step(self, episode: int, text: str) -> Step | Failure: ...

    async def use(
        self,
        episode: int | None,
        tool: str,
        arguments: Mapping[str, Any],
    ) -> str | Failure: ...

    async def reward(self, episode: int) -> float | Failure: ...

    async def close(self, episode: int) -> Failure | None: ...

    def holds(self, episode: int) -> bool:
        """Whether an episode's environment is still there after a call that failed."""
        ...

    def abandon(self) -> None:
        """End the calls that are under way, as far as that is possible, with the environments in
        their processes.
        """

    def end(self) -> None:
        """End threads and processes. Any thread may call it."""


class InWorker:
    """Environments in the worker: async functions on the event loop, others in threads.

    A call of at most ``timeout`` seconds must be async. At most ``concurrency`` calls are under way
    at once.
    """

    def __init__(self, world: World, *, timeout: float | None, concurrency: int) -> None:
        self._timeout = timeout
        self._free = asyncio.Semaphore(concurrency)
        self._threads = Threads(concurrency, "siirl-environment")
        self._room = Room(world, self._call, async_only=timeout is not None)

    async def open(
        self,
        episode: int,
        name: str,
        row: Mapping[str, Any],
        seed: int,
    ) -> Opened | Failure:
        return await guarded(self._room.reset(episode, name, row, seed))

    async def step(self, episode: int, text: str) -> Step | Failure:
        return await guarded(self._room.step(episode, text))

    async def use(
        self,
        episode: int | None,
        tool: str,
        arguments: Mapping[str, Any],
    ) -> str | Failure:
        return await guarded(self._room.use(episode, tool, arguments))

    async def reward(self, episode: int) -> float | Failure:
        return await guarded(self._room.reward(episode))

    async def close(self, episode: int) -> Failure | None:
        return await guarded(self._room.close(episode))

    def holds(self, episode: int) -> bool:
        """It is: a call that takes too long costs nothing else."""
        return True

    def abandon(self) -> None:
        """Leave threads alone: nothing stops them. Coroutines are cancelled by the session."""

    def end(self) -> None:
        self._threads.end()

    async def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        call = partial(function, *arguments, **named)
        async with self._free:
            if is_async(function):
                return await within(self._timeout, call())
            result = await self._threads.run(call)
            if inspect.isawaitable(result):
                return await within(self._timeout, result)
            return result


async def guarded(call: Awaitable[_T]) -> _T | Failure:
    """Return what a call of an environment gives, or the failure that it makes."""
    try:
        return await call
    except (CallFailed, Refused, WrongAnswer, UnknownShape) as error:
        return Failure(without_addresses(str(error)))
    except Exception as error:  # whatever a user's environment raises is reported with its episode
        return Failure(exception_text(error))


async def within(timeout: float | None, call: Awaitable[_T]) -> _T:
    """Return what a coroutine gives. CallFailed if it takes more than ``timeout`` seconds, or
    cancels itself.

    One that goes on in spite of being cancelled is left alone.
    """

    async def shielded() -> _T:
        try:
            return await call
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop
            raise CallFailed(exception_text(error)) from error

    task = asyncio.ensure_future(shielded())
    try:
        done, _ = await asyncio.wait([task], timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    if done and not task.cancelled():
        return task.result()
    if done:
        raise CallFailed("raised CancelledError")
    task.cancel()
    task.add_done_callback(_forget)
    raise CallFailed(f"took more than {timeout:g} s")


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # asyncio would report it as never retrieved


class Threads:
    """Up to ``count`` daemon threads: the interpreter does not wait at its end for a function
    that never returns.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[Thread] = []
        self._busy = 0

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what a function gives in a thread. Who is cancelled meanwhile waits for it to
        end all the same.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._busy += 1
        if self._busy > len(self._threads) < self._count:
            thread = Thread(target=self._work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(partial(_perform, function, loop, future))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        finally:
            self._busy -= 1

    def end(self) -> None:
        """End the threads, and wait for those that have nothing to do."""
        for _ in self._threads:
            self._jobs.put(None)
        if not self._busy:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _perform(
    function: Callable[[], _T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T]
) -> None:
    try:
        result = function()
        settle = partial(_settle, future, result, None)
    except (
        BaseException
    ) as error:  # SystemExit too: it is the episode's failure, not the thread's end
        failure: BaseException = error
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            failure = CallFailed(exception_text(error))  # a future takes no such error
        settle = partial(_settle, future, None, failure)
    with suppress(RuntimeError):  # the loop has ended: nobody waits any more
        loop.call_soon_threadsafe(settle)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
