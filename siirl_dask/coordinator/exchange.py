"""The all-gather of row statistics: a tree of fan-out 16, asked for and never pushed.

Members are an edge's sources, then its other targets; member ``i`` hangs below ``(i - 1) // 16``. Statistics go up
among the sources and the whole comes down to whoever asks; each member asks its parent once, however many ask it. A
tree of fan-out 16 was measured best from 4 to 1,024 workers; all-to-all does not finish at 128.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pyarrow as pa

from siirl_dask.coordinator.frames import from_frames, to_frames
from siirl_dask.coordinator.messages import Reply, Request, TransitionKey, Transport
from siirl_dask.coordinator.statistics import STATISTICS
from siirl_dask.coordinator.tasks import together
from siirl_dask.planner import Edge

FAN_OUT = 16

Own = Callable[[TransitionKey], Coroutine[Any, Any, pa.Table]]
"""This worker's statistics of a transition, once it has published it."""


class Exchange:
    """One worker's place in the trees of all its edges."""

    def __init__(self, worker: str, transport: Transport, own: Own) -> None:
        self._worker = worker
        self._transport = transport
        self._own = own
        self._asked: dict[tuple[TransitionKey, str], asyncio.Task[pa.Table]] = {}

    async def all_statistics(self, edge: Edge, key: TransitionKey) -> pa.Table:
        """The statistics of every row of the edge, from all its sources."""
        return await self._once(edge, key, "down")

    async def answer(self, edge: Edge, request: Request) -> Reply:
        table = await self._once(edge, request.key, request.op)
        return Reply(*to_frames(table))

    def forget(self, before: int) -> None:
        """Drop what was gathered in turns before sequence number ``before``."""
        for key in [key for key in self._asked if key[0].sequence < before]:
            self._asked.pop(key).cancel()

    def _once(self, edge: Edge, key: TransitionKey, direction: str) -> asyncio.Future[pa.Table]:
        task = self._asked.get((key, direction))
        if task is None:
            task = asyncio.create_task(self._up(edge, key) if direction == "up" else self._down(edge, key))
            task.add_done_callback(_mark_as_seen)
            self._asked[key, direction] = task
        return asyncio.shield(task)

    async def _up(self, edge: Edge, key: TransitionKey) -> pa.Table:
        place = edge.sources.index(self._worker)
        children = edge.sources[FAN_OUT * place + 1 : FAN_OUT * place + FAN_OUT + 1]
        asks = (self._ask(child, Request("up", key)) for child in children)
        return pa.concat_tables(await together(self._own(key), *asks))

    async def _down(self, edge: Edge, key: TransitionKey) -> pa.Table:
        members = (*edge.sources, *(worker for worker in edge.targets if worker not in edge.sources))
        place = members.index(self._worker)
        if place == 0:
            return await self._once(edge, key, "up")
        return await self._ask(members[(place - 1) // FAN_OUT], Request("down", key))

    async def _ask(self, worker: str, request: Request) -> pa.Table:
        reply = await self._transport.request(worker, request)
        return from_frames(reply.header, reply.frames, STATISTICS)


def _mark_as_seen(task: asyncio.Task[pa.Table]) -> None:
    """Whoever waited may have been cancelled first; asyncio would call the exception lost."""
    if not task.cancelled():
        task.exception()
