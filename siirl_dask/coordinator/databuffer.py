"""Databuffer: holds this worker's part of what moves, and pulls this worker's part of what others hold.

The producer publishes under an immutable key, the consumer asks; reads can be repeated. The receiver sets the pace: one
reply of at most 64 MiB per source at a time. What was published is freed when every row has been taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.exchange import Exchange
from siirl_dask.coordinator.frames import from_frames, to_frames
from siirl_dask.coordinator.messages import Reply, Request, TransitionKey, Transport, Turn
from siirl_dask.coordinator.statistics import Statistics, describe_rows, share_of
from siirl_dask.coordinator.tasks import together
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import ROW_ID

MAX_REPLY_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Published:
    statistics: pa.Table
    table: pa.Table | None
    """None once every row has been taken."""
    left: int
    """Rows that are still to be taken, once per target when the edge replicates."""


class Databuffer:
    """All methods run on the event loop that serves this worker's peers. ``edges`` are keyed ``phase/name``."""

    def __init__(self, run: str, worker: str, edges: Mapping[str, Edge], transport: Transport) -> None:
        self._run = run
        self._worker = worker
        self._edges = edges
        self._transport = transport
        self._published: dict[TransitionKey, asyncio.Future[_Published]] = {}
        self._exchange = Exchange(worker, transport, self._own_statistics)
        self._aborted: str | None = None
        self.bytes_received = 0
        """Payload that came from other workers, since the start."""

    def key(self, edge: Edge, turn: Turn) -> TransitionKey:
        return TransitionKey(self._run, turn.sequence, f"{turn.phase}/{edge.name}")

    async def publish(self, edge: Edge, turn: Turn, table: pa.Table) -> None:
        """Offer ``table`` to the edge's targets, and its statistics to whoever lays rows out by them."""
        statistics = describe_rows(table, edge.sources.index(self._worker))
        moving = table.select(edge.schema.names).cast(edge.schema).combine_chunks() if edge.moves else None
        left = table.num_rows * (len(edge.targets) if edge.rows is Rows.REPLICATED else 1)
        slot = self._slot(self.key(edge, turn))
        if not slot.done():
            slot.set_result(_Published(statistics, moving if left else None, left))

    async def pull(self, edge: Edge, guide: Edge, turn: Turn) -> pa.Table:
        """This worker's rows of the edge, sorted by row id. PeerError when a source cannot give them."""
        guide_rows = Statistics.of(await self._exchange.all_statistics(guide, self.key(guide, turn)))
        edge_rows = guide_rows
        if edge.name != guide.name:
            edge_rows = Statistics.of(await self._exchange.all_statistics(edge, self.key(edge, turn)))
        share = share_of(edge, self._worker, guide, guide_rows, edge_rows)
        key = self.key(edge, turn)
        pulls = (self._pull_from(edge, edge.sources[source], key, rows) for source, rows in share.by_source.items())
        parts = await together(*pulls)
        table = pa.concat_tables([edge.schema.empty_table(), *(table for part in parts for table in part)])
        return table.take(pc.sort_indices(table[ROW_ID]))

    async def handle(self, request: Request) -> Reply:
        """Answer a peer. PeerError refuses what does not belong to this run."""
        edge = self._edges.get(request.key.edge)
        if request.key.run != self._run or edge is None:
            raise PeerError(f"refused {request.key}: worker {self._worker!r} runs {self._run!r}")
        if request.op in ("up", "down"):
            return await self._exchange.answer(edge, request)
        published = await self._slot(request.key)
        if request.op == "rows":
            return await asyncio.to_thread(_reply_with_rows, published, request.rows)
        self._release(published, len(request.rows))
        return Reply()

    def forget(self, before: int) -> None:
        """Drop everything of turns before sequence number ``before``: all workers have completed those."""
        self._exchange.forget(before)
        for key in [key for key in self._published if key.sequence < before]:
            self._published.pop(key).cancel()

    def abort(self, reason: str) -> None:
        """Wake every wait, now and later, with Aborted."""
        self._aborted = reason
        for slot in self._published.values():
            self._fail(slot)

    def _slot(self, key: TransitionKey) -> asyncio.Future[_Published]:
        """Where a transition is, or will be, published on this worker."""
        if key not in self._published:
            self._published[key] = asyncio.get_running_loop().create_future()
            if self._aborted is not None:
                self._fail(self._published[key])
        return self._published[key]

    def _fail(self, slot: asyncio.Future[_Published]) -> None:
        if not slot.done():
            slot.set_exception(Aborted(self._aborted or ""))
            slot.exception()  # marks it as seen: not every slot has someone waiting

    async def _own_statistics(self, key: TransitionKey) -> pa.Table:
        return (await asyncio.shield(self._slot(key))).statistics

    async def _pull_from(self, edge: Edge, source: str, key: TransitionKey, rows: Ints) -> list[pa.Table]:
        if source == self._worker:
            published = await self._slot(key)
            part = _take(published, rows)
            self._release(published, len(rows))
            return [part]
        parts: list[pa.Table] = []
        asked = rows.tolist()
        while asked:
            reply = await self._transport.request(source, Request("rows", key, asked))
            part = from_frames(reply.header, reply.frames, edge.schema)
            if not 0 < part.num_rows <= len(asked):
                raise PeerError(f"worker {source!r} gave {part.num_rows} of {len(asked)} rows of edge {edge.name}")
            self.bytes_received += sum(memoryview(frame).nbytes for frame in reply.frames)
            parts.append(part)
            asked = asked[part.num_rows :]
        await self._transport.request(source, Request("release", key, rows.tolist()))
        return parts

    @staticmethod
    def _release(published: _Published, rows: int) -> None:
        published.left -= rows
        if published.left <= 0:
            published.table = None


def _take(published: _Published, rows: Ints) -> pa.Table:
    if published.table is None:
        raise PeerError("rows were asked for after every target had taken them")
    if len(rows) == published.table.num_rows and np.array_equal(rows, np.arange(len(rows))):
        return published.table
    return published.table.take(pa.array(rows))


def _reply_with_rows(published: _Published, rows: object) -> Reply:
    """As many of the rows, from the first, as fit a reply; always at least one."""
    wanted = np.asarray(rows, dtype=np.int64)
    size = len(published.statistics)
    if wanted.ndim != 1 or len(wanted) == 0 or wanted.min() < 0 or wanted.max() >= size:
        raise PeerError(f"asked for rows outside the {size} that were published")
    part = _take(published, wanted)
    while part.nbytes > MAX_REPLY_BYTES and len(wanted) > 1:
        wanted = wanted[: max(1, len(wanted) * MAX_REPLY_BYTES // (2 * part.nbytes))]
        part = _take(published, wanted)
    return Reply(*to_frames(part))
