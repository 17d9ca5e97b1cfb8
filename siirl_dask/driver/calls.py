"""Calls to the scheduler that have no timeout of their own, from the driver's thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import Any

from distributed import Client

SLICE = 0.2  # seconds within which Ctrl-C is noticed


def complete(
    client: Client,
    call: Callable[[], Awaitable[Any]],
    meanwhile: Callable[[], None] = lambda: None,
    timeout: float = math.inf,
) -> None:
    """Make a call of the client's, and call ``meanwhile`` until it is done: what that raises ends the wait.

    TimeoutError after ``timeout`` seconds.
    """

    async def work() -> None:
        await call()

    loop = client.loop
    assert loop is not None  # only an asynchronous client has no loop of its own
    calling = asyncio.run_coroutine_threadsafe(work(), loop.asyncio_loop)  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout
    try:
        while not wait([calling], SLICE).done:
            meanwhile()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer of the scheduler within {timeout:g} s")
    except BaseException:
        calling.cancel()
        raise
    calling.result()
