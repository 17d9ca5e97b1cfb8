"""Notices that the scheduler is gone or that this machine is cut off from it: Dask's client is silent for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from distributed import Client

from siirl_dask.coordinator.transport.liveness import answers

_EVERY = 0.05  # of the patience: pause between two pings


class SchedulerWatch:
    """Pings the scheduler from the client's event loop, until ``stop`` or until it has been silent for too long."""

    def __init__(self, client: Client, patience: float, on_silence: Callable[[str], None]) -> None:
        """``patience`` is in seconds. ``on_silence`` is called once, on the event loop, with its address."""
        self._client = client
        self._patience = patience
        self._on_silence = on_silence
        self._watching: Future[None] | None = None
        self._scheduler: Any = None

    def start(self) -> None:
        """Begin to ping."""
        loop, self._scheduler = self._client.loop, self._client.scheduler
        assert loop is not None  # only an asynchronous client has no loop of its own
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), loop.asyncio_loop)  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Ping no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while await answers(self._ping, self._patience):
            await asyncio.sleep(_EVERY * self._patience)
        self._on_silence(self._scheduler.address)

    async def _ping(self) -> bool:
        try:
            await self._scheduler.echo(data=None)
        except OSError:  # no connection, which may pass
            return False
        return True
