"""Serves a queue with an engine that answers requests one by one, many at once, from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from siirl_dask.rollout.engine import Generation, GenerationRequest, RequestQueue

_LOOK_AGAIN = 0.05  # seconds until the queue is asked again for rows, while others are generated
_PATIENCE = 10.0  # seconds for an engine to end what is under way


async def serve_concurrently(
    queue: RequestQueue,
    most: int,
    ask: Callable[[GenerationRequest], Awaitable[Generation]],
    abort: Callable[[], None] | None = None,
) -> None:
    """Have ``ask`` answer all requests of a queue, at most so many at once; a row that is done makes
    room for the next at once. What it raises ends all.

    ``abort`` is called after an error, to end what is under way in the engine, which then ends what
    waits for it; None: nothing more is waited for.
    """
    running: dict[asyncio.Task[Generation], Any] = {}
    try:
        while True:
            room = most - len(running)
            for ticket, request in queue.next(room, wait=not running) if room else ():
                running[asyncio.ensure_future(ask(request))] = ticket
            if not running:
                return
            done, _ = await asyncio.wait(
                running, timeout=_LOOK_AGAIN, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                ticket = running.pop(task)
                queue.complete(ticket, task.result())
    finally:
        if running:
            if abort is not None:
                abort()
                await asyncio.wait(running, timeout=_PATIENCE)
            for task in running:
                task.cancel()
            # the error that ended the others is the one to tell
            await asyncio.gather(*running, return_exceptions=True)
