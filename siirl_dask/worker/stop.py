"""Being told to stop, from any thread, and waiting for the event loop in slices so that the word is heard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from siirl_dask.errors import Aborted

_T = TypeVar("_T")
_SLICE = 0.1  # seconds: Ctrl-C and a peer's failure are heard within one


class StopFlag:
    """Set once, with the reason."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._reason = ""

    def set(self, reason: str) -> None:
        if not self._event.is_set():
            self._reason = reason
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Let so much time pass. Aborted as soon as the flag is set."""
        self._event.wait(seconds)
        self.check()

    def check(self) -> None:
        """Aborted when the flag is set."""
        if self._event.is_set():
            raise Aborted(self._reason)


def wait_for(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop, stop: StopFlag) -> _T:
    """Run ``work`` on ``loop`` from another thread and wait for it. Aborted as soon as the flag is set."""
    return finished(asyncio.run_coroutine_threadsafe(work, loop), stop)


def finished(future: Future[_T], stop: StopFlag) -> _T:
    """What ``future`` gives, waited for likewise."""
    while True:
        try:
            return future.result(timeout=_SLICE)
        except FutureTimeout:
            if future.done():  # it may have ended since; or it is the work's own timeout
                return future.result()
            try:
                stop.check()
            except Aborted:
                future.cancel()
                raise
        except Exception:
            stop.check()  # a peer that was aborted first looks dead from here: the abort is the cause
            raise
