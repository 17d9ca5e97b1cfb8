"""The all-gather of row statistics: a tree of fan-out 16, asked for and never pushed.

Members are an edge's sources, then its other targets; member ``i`` hangs below ``(i - 1) // 16``. Statistics go up
among the sources and the whole comes down to whoever asks; each member asks its parent once, however many ask it. A
tree of fan-out 16 was measured best from 4 to 1,024 workers; all-to-all does not finish at 128.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from siirl_dask.coordinator.description import Description, pack_descriptions, unpack_descriptions
from siirl_dask.coordinator.messages import Op, Reply, Request, TransitionKey, Transport
from siirl_dask.coordinator.statistics import Lines, unpack_lines
from siirl_dask.coordinator.tasks import together
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge

FAN_OUT = 16


@dataclass(frozen=True)
class Gathered:
    """What is known of an edge's rows: of one source's, of those below a member of the tree, or of all."""

    statistics: Lines
    descriptions: Mapping[int, Description] = field(default_factory=dict)
    """By source; of an edge that moves no rows there are none."""

    @staticmethod
    def merge(parts: Sequence[Gathered]) -> Gathered:
        descriptions = {source: found for part in parts for source, found in part.descriptions.items()}
        return Gathered(np.concatenate([part.statistics for part in parts]), descriptions)

    @cached_property
    def reply(self) -> Reply:
        """The same for everyone who asks."""
        about, patterns = pack_descriptions(self.descriptions.values())
        return Reply({"about": about}, [self.statistics.tobytes(), *patterns])


Own = Callable[[TransitionKey], Coroutine[Any, Any, Gathered]]
"""What this worker knows of its own rows of a transition, once it has published them."""


class Exchange:
    """One worker's place in the trees of all its edges."""

    def __init__(self, worker: str, transport: Transport, own: Own) -> None:
        self._worker = worker
        self._transport = transport
        self._own = own
        self._asked: dict[tuple[TransitionKey, Op], asyncio.Task[Gathered]] = {}

    async def gather(self, edge: Edge, key: TransitionKey) -> Gathered:
        """What is known of every row of the edge, from all its sources."""
        return await self._once(edge, key, Op.DOWN)

    async def answer(self, edge: Edge, request: Request) -> Reply:
        member = edge.sources if request.op == Op.UP else _members(edge)
        if self._worker not in member:
            raise PeerError(f"worker {self._worker!r} has no part in the statistics of edge {edge.name}")
        return (await self._once(edge, request.key, Op(request.op))).reply

    def forget(self, before: int) -> None:
        """Drop what was gathered in turns before sequence number ``before``."""
        for key in [key for key in self._asked if key[0].sequence < before]:
            self._asked.pop(key).cancel()

    def close(self) -> None:
        """Give up whatever is still being gathered."""
        for task in self._asked.values():
            task.cancel()
        self._asked.clear()

    def _once(self, edge: Edge, key: TransitionKey, direction: Op) -> asyncio.Future[Gathered]:
        task = self._asked.get((key, direction))
        if task is None:
            task = asyncio.create_task(self._up(edge, key) if direction is Op.UP else self._down(edge, key))
            task.add_done_callback(_mark_as_seen)
            self._asked[key, direction] = task
        return asyncio.shield(task)

    async def _up(self, edge: Edge, key: TransitionKey) -> Gathered:
        place = edge.sources.index(self._worker)
        children = edge.sources[FAN_OUT * place + 1 : FAN_OUT * place + FAN_OUT + 1]
        asks = (self._ask(edge, child, Request(Op.UP, key)) for child in children)
        return Gathered.merge(await together(self._own(key), *asks))

    async def _down(self, edge: Edge, key: TransitionKey) -> Gathered:
        members = _members(edge)
        place = members.index(self._worker)
        if place == 0:
            return await self._once(edge, key, Op.UP)
        return await self._ask(edge, members[(place - 1) // FAN_OUT], Request(Op.DOWN, key))

    async def _ask(self, edge: Edge, worker: str, request: Request) -> Gathered:
        reply = await self._transport.request(worker, request)
        try:
            return _read(reply, edge)
        except PeerError as error:
            raise PeerError(f"edge {edge.name}, {request.op} from worker {worker!r}: {error}") from error


def _members(edge: Edge) -> tuple[str, ...]:
    sources = set(edge.sources)
    return (*edge.sources, *(worker for worker in edge.targets if worker not in sources))


def _read(reply: Reply, edge: Edge) -> Gathered:
    if not reply.frames:
        raise PeerError("received no statistics")
    lines = unpack_lines(reply.frames[0], len(edge.sources))
    about = unpack_descriptions(reply.header.get("about"), reply.frames[1:], len(edge.sources), edge.schema)
    return Gathered(lines, about)


def _mark_as_seen(task: asyncio.Task[Gathered]) -> None:
    """Whoever waited may have been cancelled first; asyncio would call the exception lost."""
    if not task.cancelled():
        task.exception()
