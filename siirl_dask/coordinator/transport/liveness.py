"""Pings, which distinguish a process that is gone from one that is busy, or behind a link that is down for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

_SLICES = 10


async def answers(ping: Callable[[], Coroutine[Any, Any, bool]], seconds: float) -> bool:
    """Return whether one of several pings is answered within ``seconds``.

    ``ping()`` returns False where its connection failed, which may pass. Each slice of the time begins a new ping, over
    a new connection, and earlier ones go on: after an outage a new connection is up at once, where TCP waits longer
    each time before it repeats what an old one lost. A slice in which this process itself was frozen or starved does
    not count: the answer is read in the next.
    """
    loop = asyncio.get_running_loop()
    pause = seconds / _SLICES
    pings: set[asyncio.Task[bool]] = set()
    remaining = _SLICES
    try:
        while remaining:
            pings.add(asyncio.create_task(ping()))
            end = loop.time() + pause
            while pings:
                left = end - loop.time()
                if left <= 0:
                    break
                done, pings = await asyncio.wait(pings, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done):
                    return True
            await asyncio.sleep(max(0.0, end - loop.time()))
            if loop.time() < end + pause:
                remaining -= 1
    finally:
        for task in pings:
            task.cancel()
    return False
