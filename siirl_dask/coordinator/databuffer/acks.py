"""Telling sources, some time after, what has arrived and may be freed."""

from __future__ import annotations

import asyncio
import logging

from siirl_dask.coordinator.messages import Op, Request, TransitionKey, Transport
from siirl_dask.errors import SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
_DELAY = 0.1  # seconds: one message a source for what was taken meanwhile, and none while others still wait for rows


class Releases:
    """Of one worker."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._taken: dict[str, list[tuple[TransitionKey, int]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def note(self, source: str, key: TransitionKey, count: int) -> None:
        """``count`` rows of a transition have been taken from a source."""
        self._taken.setdefault(source, []).append((key, count))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY, self.flush)

    async def settle(self) -> None:
        """Tell them now, and wait until all have heard."""
        self.flush()
        await asyncio.gather(*self._sending)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()

    def flush(self) -> None:
        """Tell them now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken, self._taken = self._taken, {}
        for source, items in taken.items():
            task = asyncio.create_task(self._send(source, items))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, source: str, items: list[tuple[TransitionKey, int]]) -> None:
        body = {"taken": [[key.sequence, key.edge, count] for key, count in items]}
        try:
            await self._transport.request(source, Request(Op.RELEASE, items[0][0], body))
        except SiirlError as error:  # the rows are here; a source that waits for this ends the run if it never hears
            logger.warning("worker %r did not hear what has arrived: %s", source, error)
