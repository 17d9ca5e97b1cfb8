"""Acks: shortly after a pull, sources learn which rows have arrived and may be freed."""

from __future__ import annotations

import asyncio
import logging

from siirl_dask.coordinator.transport.messages import Op, Request, TransitionKey, Transport
from siirl_dask.errors import SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
_ACK_DELAY = 0.1
"""Seconds: acks of one source share a message, and none is sent while other workers wait for
rows."""


class Acks:
    """Collects one worker's acks and sends them, one message a source. Belongs to the event loop.

    An ack is counted, not read: it is sent exactly once, and never repeated after a failure.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: dict[str, list[tuple[TransitionKey, int]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(self, source: str, key: TransitionKey, rows: int) -> None:
        """Ack soon that ``rows`` of a source's rows of a transition have arrived."""
        if self._closed:
            return
        self._pending.setdefault(source, []).append((key, rows))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ACK_DELAY, self.flush)

    def add_and_flush(self, source: str, key: TransitionKey, rows: int) -> None:
        """Ack now that ``rows`` of a source's rows of a transition have arrived."""
        self.add(source, key, rows)
        self.flush()

    def flush(self) -> None:
        """Send now what has been collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending = self._pending
        self._pending = {}
        for source, acks in pending.items():
            task = asyncio.create_task(self._send(source, acks))
            self._sending.add(task)  # the loop itself keeps no reference to a task
            task.add_done_callback(self._sending.discard)

    async def wait(self) -> None:
        """Send now what has been collected, and wait until every source has received it."""
        self.flush()
        await asyncio.gather(*self._sending)

    def close(self) -> None:
        """Send no more: the run is over or is being stopped, and sources free their tables with
        it.
        """
        self._closed = True
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()

    async def _send(self, source: str, acks: list[tuple[TransitionKey, int]]) -> None:
        body = {"acks": [[key.sequence, key.edge, rows] for key, rows in acks]}
        try:
            await self._transport.request(source, Request(Op.ACK, acks[0][0], body))
        except SiirlError as error:
            # No failure of this worker: it has its rows. The source frees the table when its
            # iteration is forgotten, a shared one when the run ends; if it waits for the ack, it
            # times out and ends the run.
            logger.warning("worker %r did not hear which rows have arrived: %s", source, error)
