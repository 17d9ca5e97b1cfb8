"""Reads stores for the pages of a server in threads of their own: its event loop waits for none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from siirl_dask.errors import ConfigError

T = TypeVar("T")
_THREADS = 8
PATIENCE = 20.0
"""Seconds for which a viewer waits."""


class StoreThreads:
    """Gives each question to a store a thread, and viewers who ask the same one answer. Its methods
    belong to one event loop.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, Future[Any]] = {}

    async def read(self, key: Hashable, read: Callable[[], T], patience: float | None = None) -> T:
        """Return what ``read`` returns, or raise what it raises; ``key`` says what it asks.

        ConfigError where it takes longer than ``patience`` seconds, PATIENCE by default, and where
        all threads wait for a store: the page may be asked for again.
        """
        longest = patience
        if patience is None:
            longest = PATIENCE
        future: Future[T] | None = self._under_way.get(key)
        if future is None:
            if len(self._under_way) >= _THREADS:
                raise ConfigError(
                    f"the store is slow: {_THREADS} questions wait for its answer; ask again later"
                )
            future = Future()
            self._under_way[key] = future
            asked = asyncio.wrap_future(future)
            asked.add_done_callback(lambda done: self._forget(key, done))
            # a daemon: a store that never answers must not keep the process from ending
            arguments = (future, read)
            threading.Thread(target=_answer, args=arguments, name="siirl-list", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), longest)
        except TimeoutError as error:
            raise ConfigError(
                f"the store has not answered for {longest:g} s, and is still asked; ask again later"
            ) from error

    def _forget(self, key: Hashable, done: asyncio.Future[Any]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # those who wait for the answer raise it


def _answer(future: Future[T], read: Callable[[], T]) -> None:
    try:
        future.set_result(read())
    except Exception as error:  # whoever waits raises it
        future.set_exception(error)
