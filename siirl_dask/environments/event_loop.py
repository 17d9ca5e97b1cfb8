"""An event loop in a thread of its own, which lives as long as the environments do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

logger = logging.getLogger("siirl_dask.environments")
_T = TypeVar("_T")
_PATIENCE = 2.0  # seconds for what is cancelled to end; a coroutine that goes on is left alone


class EventLoop:
    """An event loop; its thread calls ``bind`` first. A client that an environment keeps stays
    on the same one.
    """

    def __init__(self, name: str, bind: Callable[[], None]) -> None:
        self._bind = bind
        self._loop = asyncio.new_event_loop()
        # Not of a pool: the interpreter would wait at its end for a coroutine that never returns.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function on the loop soon. Any thread may call this; after the end nothing
        happens.
        """
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin a coroutine on the loop. Any thread may call this."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Cancel what is under way, and end the thread."""
        self.call_soon(self._loop.stop)
        self._thread.join(2 * _PATIENCE)

    def _run(self) -> None:
        self._bind()
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            _, deaf = self._loop.run_until_complete(asyncio.wait(left, timeout=_PATIENCE))
            if deaf:
                logger.warning(
                    "coroutines of environments that go on though cancelled are left: %d", len(deaf)
                )
                # asyncio would report each once more, when it is collected: in any later run of
                # this process
                self._loop.set_exception_handler(lambda loop, context: None)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
