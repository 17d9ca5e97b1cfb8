"""Threads that copy bytes, so that the event loop goes on answering peers meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SMALL = 2**23  # bytes: copied in a millisecond or so, of which waking a thread would take a good part
_MOST_THREADS = 4  # a few are enough for the bandwidth of memory


class Movers:
    """A few threads of one worker. Each copy keeps a core busy, and other workers of the host have theirs."""

    def __init__(self) -> None:
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="siirl-mover")

    async def run(self, nbytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of ``work``, which moves about ``nbytes``; here and now if they are few."""
        if nbytes <= _SMALL:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
