"""Databuffer: holds this worker's part of what moves, and pulls this worker's part of what others hold.

The producer publishes under an immutable key, the consumer asks (see ``pulling``); reads can be repeated. What was
published is freed when every row has been taken, and lies in a file meanwhile when too much is waiting.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from siirl_dask.config import Way
from siirl_dask.coordinator.arena import Arena, Attachments, CannotMap
from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.budget import Budget
from siirl_dask.coordinator.description import Description
from siirl_dask.coordinator.exchange import Exchange, Gathered
from siirl_dask.coordinator.frames import check_types
from siirl_dask.coordinator.limits import Limits
from siirl_dask.coordinator.messages import Op, Reply, Request, TransitionKey, Transport, Turn, pack_ints, unpack_ints
from siirl_dask.coordinator.movers import Movers
from siirl_dask.coordinator.published import Published, spill
from siirl_dask.coordinator.pulling import Puller, Traffic
from siirl_dask.coordinator.statistics import Share, Statistics, describe_rows, share_of
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.planner import Edge, Rows


class Databuffer:
    """All methods run on the event loop that serves this worker's peers. ``edges`` are keyed ``phase/name``.

    A table may be published and pulled in parts, by number, each by itself. ``quadratic_from``: see
    ``statistics.assign``. ``stall_timeout``: seconds that peers may take to fetch a part.
    """

    def __init__(
        self,
        run: str,
        worker: str,
        edges: Mapping[str, Edge],
        transport: Transport,
        *,
        way: Way = Way.auto,
        limits: Limits | None = None,
        quadratic_from: int = 0,
        stall_timeout: float = 600.0,
    ) -> None:
        for edge in edges.values():
            check_types(edge.schema)
        self._run = run
        self._worker = worker
        self._edges = edges
        self._limits = limits or Limits()
        self._quadratic_from = quadratic_from
        self._stall_timeout = stall_timeout
        self._slots: dict[TransitionKey, asyncio.Future[Published]] = {}
        self._exchange = Exchange(worker, transport, self._gather_own)
        self._forgotten = 0
        self._aborted: str | None = None
        self._serving = Budget(self._limits.memory // 8)
        self._attachments = Attachments(writable=True)
        self._way = way
        self.arena = Arena(keep=self._limits.memory // 2)
        self._movers = Movers()
        self._puller = Puller(worker, transport, self._own, self.arena, self._movers, self._limits, way)

    @property
    def waiting(self) -> int:
        """Bytes in memory that were published and wait to be taken."""
        return sum(published.nbytes for published in self._all_published())

    @property
    def traffic(self) -> Traffic:
        return self._puller.traffic

    def key(self, edge: Edge, turn: Turn, part: int | None = None) -> TransitionKey:
        name = f"{turn.phase}/{edge.name}"
        return TransitionKey(self._run, turn.sequence, name if part is None else f"{name}/{part}")

    async def publish(self, edge: Edge, turn: Turn, table: pa.Table, part: int | None = None) -> None:
        """Offer ``table`` to the edge's targets, and its statistics to whoever lays rows out by them."""
        statistics = describe_rows(table, edge.sources.index(self._worker))
        moving = _as_declared(table, edge.schema) if edge.moves and table.num_rows else None
        left = table.num_rows * (len(edge.targets) if edge.rows is Rows.REPLICATED else 1)
        published = Published(statistics, moving, left)
        if moving is not None and published.nbytes + self.waiting > self._limits.memory // 4:
            published.table, published.spilled = await asyncio.to_thread(spill, moving, self._limits.spill_folder)
        elif moving is not None and self._lends(edge):
            await self._movers.run(published.nbytes, published.lend, self.arena, self._limits.lend_from)
        if published.table is not None:
            await self._movers.run(published.copied, published.columns)  # once, and not while a peer waits
        slot = self._slot(self.key(edge, turn, part))
        if not slot.done():
            slot.set_result(published)

    async def until_taken(self, edge: Edge, turn: Turn, part: int) -> None:
        """Wait until every target has what this worker published of a part. PeerError when they take too long."""
        published = await self._own(self.key(edge, turn, part))
        try:
            async with asyncio.timeout(self._stall_timeout):
                await published.gone.wait()
        except TimeoutError as error:
            raise PeerError(
                f"{turn}: edge {edge.name}, part {part}: worker {self._worker!r} still has {published.left} rows that "
                f"workers {list(edge.targets)} should have taken within {self._stall_timeout:g} s "
                "(cluster.stall_timeout)"
            ) from error
        if self._aborted is not None:
            raise Aborted(self._aborted)

    async def pull(self, edge: Edge, guide: Edge, turn: Turn, part: int | None = None) -> pa.Table:
        """This worker's rows of the edge, sorted by row id. PeerError when a source cannot give them."""
        try:
            share, descriptions = await self._share(edge, guide, turn, part)
            table = await self._puller.bring(edge, self.key(edge, turn, part), share, descriptions)
            if part is not None:
                self._puller.releases.flush()  # sources wait for it
            return table
        except PeerError as error:
            raise PeerError(f"{turn}: {error}") from error

    async def handle(self, request: Request) -> Reply:
        """Answer a peer. PeerError refuses what does not belong to this run, or asks for what there is not."""
        edge = self._edge(request.key)
        if request.key.run != self._run or edge is None:
            raise PeerError(f"refused {request.key}: worker {self._worker!r} runs {self._run!r}")
        if request.op == Op.RELEASE:  # may come late: what was taken of a forgotten turn is freed already
            return self._release(request.body.get("taken"))
        if request.key.sequence < self._forgotten:
            raise PeerError(f"refused {request.key}: every worker has completed that turn")
        if request.op in (Op.UP, Op.DOWN):
            return await self._exchange.answer(edge, request)
        published = await self._own(request.key)
        rows = unpack_ints(request.body.get("rows"), published.rows, published.rows)
        if not len(rows) or request.op not in (Op.DESCRIBE, Op.FILL):
            raise PeerError(f"refused {request.op!r} of {len(rows)} rows of edge {request.key.edge}")
        if request.op == Op.DESCRIBE:
            return Reply({}, list(map(pack_ints, published.lengths(rows))))
        return await self._fill(published, rows, request.body)

    async def settle(self) -> None:
        """Wait until sources have freed what this worker has taken; nothing else needs to."""
        await self._puller.releases.settle()

    def forget(self, before: int) -> None:
        """Drop everything of turns before sequence number ``before``: all workers have completed those."""
        self._forgotten = max(self._forgotten, before)
        self._exchange.forget(before)
        for key in [key for key in self._slots if key.sequence < before]:
            if not self._is_lent(self._slots[key]):
                self._slots.pop(key).cancel()
        self.arena.collect()

    def abort(self, reason: str) -> None:
        """Wake every wait, now and later, with Aborted."""
        self._aborted = reason
        for slot in self._slots.values():
            self._fail(slot)
        for published in self._all_published():
            published.gone.set()

    def close(self) -> None:
        """Let go of all memory that is kept and of what others have shared."""
        self._exchange.close()
        self._slots.clear()
        self._attachments.clear()
        self._puller.releases.close()
        self._movers.close()

    def _edge(self, key: TransitionKey) -> Edge | None:
        """That of a key, or of the key of a part."""
        whole, _, part = key.edge.rpartition("/")
        return self._edges.get(key.edge) or (self._edges.get(whole) if part.isdecimal() else None)

    def _all_published(self) -> Iterator[Published]:
        done = (slot for slot in self._slots.values() if slot.done() and not slot.cancelled())
        return (slot.result() for slot in done if slot.exception() is None)

    def _lends(self, edge: Edge) -> bool:
        """Where several workers get the same rows, one copy is enough for all of this host."""
        others = sum(target != self._worker for target in edge.targets)
        return edge.rows is Rows.REPLICATED and others > 1 and self._way is not Way.dask

    @staticmethod
    def _is_lent(slot: asyncio.Future[Published]) -> bool:
        return slot.done() and not slot.cancelled() and slot.exception() is None and slot.result().is_lent

    def _slot(self, key: TransitionKey) -> asyncio.Future[Published]:
        if key not in self._slots:
            self._slots[key] = asyncio.get_running_loop().create_future()
            if self._aborted is not None:
                self._fail(self._slots[key])
        return self._slots[key]

    def _fail(self, slot: asyncio.Future[Published]) -> None:
        if not slot.done():
            slot.set_exception(Aborted(self._aborted or ""))
            slot.exception()  # marks it as seen: not every slot has someone waiting

    async def _gather_own(self, key: TransitionKey) -> Gathered:
        published, edge = await self._own(key), self._edge(key)
        assert edge is not None
        if published.table is None:
            return Gathered(published.statistics)
        source, most = edge.sources.index(self._worker), self._limits.described // len(edge.sources)
        return Gathered(published.statistics, {source: published.describe(source, most)})

    async def _own(self, key: TransitionKey) -> Published:
        """What this worker publishes of a transition, once it has."""
        return await asyncio.shield(self._slot(key))

    async def _share(
        self, edge: Edge, guide: Edge, turn: Turn, part: int | None
    ) -> tuple[Share, Mapping[int, Description]]:
        """Which rows are this worker's, and what is known of them."""
        guiding = await self._exchange.gather(guide, self.key(guide, turn, part))
        same = edge.name == guide.name
        moving = guiding if same else await self._exchange.gather(edge, self.key(edge, turn, part))

        def decide() -> Share:
            guide_rows = Statistics.of(guiding.statistics)
            edge_rows = guide_rows if same else Statistics.of(moving.statistics)
            return share_of(edge, self._worker, guide, guide_rows, edge_rows, self._quadratic_from)

        return await self._movers.run(guiding.statistics.nbytes, decide), moving.descriptions

    async def _fill(self, published: Published, rows: Ints, body: Mapping[str, Any]) -> Reply:
        """Write rows where the asker wants them, or send them; plain columns are sent, of as many rows as fit."""
        columns, target = body.get("columns"), body.get("target")
        known = published.columns()
        if not isinstance(columns, list | tuple) or any(name not in known for name in columns):
            raise PeerError(f"asked for columns {str(columns)[:80]}: expected some of {known}")
        asked = rows if body.get("plain") else rows[:0]
        most = self._limits.chunk
        plain, frames, count = await self._movers.run(
            min(most, len(asked) * published.row_bytes), published.plain_reply, asked, most
        )
        count = count or len(rows)
        rows = rows[:count]
        header = {"rows": count, "plain": plain, "split": len(frames)}
        size = published.nbytes_of(rows, columns)
        if target is not None:
            try:
                await self._movers.run(size, published.write, rows, columns, target, self._attachments)
            except CannotMap as error:
                return Reply({"cannot map": str(error)})
            return Reply(header | {"written": size}, frames)
        if size > most and len(rows) > 1:
            raise PeerError(f"asked for {size} bytes at once: expected at most {most}")
        return Reply(header, [*frames, *await self._gather(published, rows, columns, size)])

    async def _gather(
        self, published: Published, rows: Ints, columns: Sequence[str], size: int
    ) -> Sequence[memoryview]:
        await self._serving.take(size)
        try:
            frames = await self._movers.run(size, published.gather, rows, columns, self.arena)
        except BaseException:
            self._serving.give(size)
            raise
        loop = asyncio.get_running_loop()
        for frame in frames:  # it is referred to until its last byte has left
            weakref.finalize(frame.obj, self._give_back, loop, frame.nbytes).atexit = False
        return frames

    def _give_back(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._serving.give, nbytes)

    def _release(self, taken: object) -> Reply:
        for item in taken if isinstance(taken, list | tuple) else [taken]:
            match item:
                case [int(sequence), str(edge), int(count)] if count > 0:
                    slot = self._slots.get(TransitionKey(self._run, sequence, edge))
                    if slot is not None and slot.done() and not slot.cancelled() and slot.exception() is None:
                        slot.result().take(count)
                case _:
                    raise PeerError(f"received {str(item)[:80]!r} for what was taken")
        return Reply()


def _as_declared(table: pa.Table, schema: pa.Schema) -> pa.Table:
    table = table.select(schema.names)
    return table if table.schema.equals(schema) else table.cast(schema)
