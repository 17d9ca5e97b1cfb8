"""Pulling: a worker's share of an edge, brought from its sources into one table in its final order.

The consumer first learns how long its rows are, lays its result out in memory that it keeps and uses again, and then
has each row brought to its final place: written there by the source where both are processes of one host, and received
in chunks otherwise, two in flight per source. What a source of its host lends it reads where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.config import Way
from siirl_dask.coordinator.arena import Arena, shared_memory_domain
from siirl_dask.coordinator.assembly import Assembly, Chunk, Part
from siirl_dask.coordinator.borrowing import Borrower
from siirl_dask.coordinator.budget import Budget
from siirl_dask.coordinator.description import LONGEST, Description, plain_schema
from siirl_dask.coordinator.frames import Frame, from_frames
from siirl_dask.coordinator.limits import Limits
from siirl_dask.coordinator.messages import Op, Reply, Request, TransitionKey, Transport, pack_ints, unpack_ints
from siirl_dask.coordinator.movers import Movers
from siirl_dask.coordinator.published import Published
from siirl_dask.coordinator.releases import Releases
from siirl_dask.coordinator.statistics import Share
from siirl_dask.coordinator.tasks import together
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge

logger = logging.getLogger("siirl_dask.coordinator")
_IN_FLIGHT = 2  # chunks per source
_MOST_ROWS = 2**16  # that a source is asked to write at once: their places travel with the request


@dataclass(slots=True)
class Traffic:
    """Payload that came from other workers since the start, in bytes, by the way it came."""

    messages: int = 0
    shared_memory: int = 0

    @property
    def total(self) -> int:
        return self.messages + self.shared_memory


class Puller:
    """One worker's pulls. ``own`` gives what the worker itself published, once it has."""

    def __init__(
        self,
        worker: str,
        transport: Transport,
        own: Callable[[TransitionKey], Awaitable[Published]],
        arena: Arena,
        movers: Movers,
        limits: Limits,
        way: Way,
    ) -> None:
        self._worker = worker
        self._transport = transport
        self._own = own
        self._arena = arena
        self._limits = limits
        self._way = way
        self._receiving = Budget(limits.memory // 8)
        self._apart: set[str] = set()
        self._movers = movers
        self.releases = Releases(transport)
        self._borrower = Borrower(worker, own, self.releases, way)
        self.traffic = Traffic()

    async def bring(
        self, edge: Edge, key: TransitionKey, share: Share, descriptions: Mapping[int, Description]
    ) -> pa.Table:
        """The rows of the share, sorted by row id."""
        if not len(share.row_ids):
            return edge.schema.empty_table()
        if (whole := await self._whole(edge, key, share)) is not None:
            return whole
        found = {
            source: await self._borrower.borrow(edge, key, source, share, descriptions.get(source))
            for source in share.by_source
        }
        borrowed = [one for one in found.values() if one is not None]
        asked = (source for source, one in found.items() if one is None)
        parts = await together(*(self._part(edge, key, source, share, descriptions) for source in asked))
        assembly = Assembly(edge.schema, share.identity, parts, self._arena, borrowed)
        try:
            await together(*(self._fill(assembly, key, part) for part in parts))
        except BaseException:
            for segment in assembly.segments():
                self._arena.retire(segment)  # a source may still be writing
            assembly.abandon()
            raise
        for part in parts:
            if part.source != self._worker:  # what is borrowed is given back when nothing refers to it
                self.releases.note(part.source, key, len(part.rows))
        own = [share.by_source[source] for source in share.by_source if edge.sources[source] == self._worker]
        if own:
            (await self._own(key)).take(len(own[0]))
        self.traffic.shared_memory += sum(one.nbytes for one in borrowed if one.source != self._worker)
        try:
            return await self._movers.run(assembly.plain_bytes, assembly.table)
        except pa.ArrowException as error:  # such as text that is not UTF-8
            assembly.abandon()
            error.__traceback__ = None  # its frames refer to the memory
            raise PeerError(f"edge {edge.name}: what arrived is no table of {edge.schema.names}: {error}") from error

    async def _whole(self, edge: Edge, key: TransitionKey, share: Share) -> pa.Table | None:
        """What this worker published itself, when it is the share already: nothing moves."""
        if [edge.sources[source] for source in share.by_source] != [self._worker]:
            return None
        (rows,) = share.by_source.values()
        published = await self._own(key)
        if len(rows) != published.rows or not np.array_equal(rows, np.arange(len(rows))) or published.table is None:
            return None
        table = published.table
        published.take(len(rows))
        return table

    async def _part(
        self, edge: Edge, key: TransitionKey, source: int, share: Share, descriptions: Mapping[int, Description]
    ) -> Part:
        """What is to come from one source, and how long its rows are."""
        worker, rows, places = edge.sources[source], share.by_source[source], share.places[source]
        about = descriptions.get(source)
        if about is None:
            raise PeerError(f"edge {edge.name}: worker {worker!r} did not describe its rows")
        if about.patterns is not None:
            lengths = about.lengths(rows)
        elif worker == self._worker:
            patterns = (await self._own(key)).lengths(rows)
            lengths = {name: patterns[pattern] for name, pattern in about.columns.items()}
        else:
            reply = await self._transport.request(worker, Request(Op.DESCRIBE, key, {"rows": pack_ints(rows)}))
            patterns = [unpack_ints(bytes(frame), LONGEST, len(rows)) for frame in reply.frames]
            if len(patterns) <= max(about.columns.values(), default=-1) or any(len(p) != len(rows) for p in patterns):
                raise PeerError(f"edge {edge.name}: worker {worker!r} described other rows than it was asked about")
            lengths = {name: patterns[pattern] for name, pattern in about.columns.items()}
        return Part(worker, rows, places, lengths, about.row_bytes, about.domain)

    async def _fill(self, assembly: Assembly, key: TransitionKey, part: Part) -> None:
        if part.source == self._worker:
            size = assembly.missing(part) + len(part.rows) * part.row_bytes
            await self._movers.run(size, assembly.put_own, part, await self._own(key))
        elif assembly.missing(part) and self._reaches(part):
            await self._have_written(assembly, key, part)
        else:
            await self._receive(assembly, key, part)

    def _reaches(self, part: Part) -> bool:
        """Whether the source can write into this process's memory."""
        same = part.domain == shared_memory_domain() != ""
        if self._way is Way.shm and not same:
            raise PeerError(f"data.transport=shm, but worker {part.source!r} shares no memory with {self._worker!r}")
        return self._way is not Way.dask and same and part.source not in self._apart

    async def _have_written(self, assembly: Assembly, key: TransitionKey, part: Part) -> None:
        """Have the source write its rows to where they belong. Plain columns that are large may take several turns."""
        left = np.arange(len(part.rows))
        while len(left):
            some = left[: max(1, min(_MOST_ROWS, self._limits.chunk // max(1, part.row_bytes)))]
            chunk = Chunk(some, list(part.lengths), True, assembly.missing(part, some))
            reply = await self._ask_for(key, part, chunk, assembly.target(part, some))
            if (reason := reply.header.get("cannot map")) is not None:
                if self._way is Way.shm:
                    raise PeerError(f"data.transport=shm, but worker {part.source!r} cannot write here: {reason}")
                logger.warning("rows of worker %r come as messages: %s", part.source, reason)
                self._apart.add(part.source)
                await self._receive(assembly, key, part)
                return
            done, frames = self._put_plain(assembly, part, chunk, reply)
            expected, written = assembly.missing(part, left[:done]), reply.header.get("written")
            if frames or written != expected:
                raise PeerError(f"worker {part.source!r} wrote {written!r} bytes of the {expected} that it described")
            left = left[done:]
        self.traffic.shared_memory += assembly.missing(part)

    async def _receive(self, assembly: Assembly, key: TransitionKey, part: Part) -> None:
        chunks = assembly.chunks(part, self._limits.chunk)

        async def one_after_the_other() -> None:
            for chunk in chunks:
                async with self._receiving.room_for(chunk.nbytes):
                    await self._receive_chunk(assembly, key, part, chunk)

        await together(*(one_after_the_other() for _ in range(_IN_FLIGHT)))

    async def _receive_chunk(self, assembly: Assembly, key: TransitionKey, part: Part, chunk: Chunk) -> None:
        left = chunk
        while len(left.rows):
            reply = await self._ask_for(key, part, left, None)
            done, frames = self._put_plain(assembly, part, left, reply)
            if len(frames) != len(left.columns):
                raise PeerError(f"worker {part.source!r} sent {len(frames)} columns instead of {len(left.columns)}")
            received = dict(zip(left.columns, frames, strict=True))
            await self._movers.run(left.nbytes, assembly.put, part, left.rows[:done], received)
            left = replace(left, rows=left.rows[done:])

    async def _ask_for(self, key: TransitionKey, part: Part, chunk: Chunk, target: dict[str, Any] | None) -> Reply:
        body = {"rows": pack_ints(part.rows[chunk.rows]), "columns": list(chunk.columns), "plain": chunk.plain}
        reply = await self._transport.request(part.source, Request(Op.FILL, key, body | {"target": target}))
        self.traffic.messages += reply.nbytes
        return reply

    def _put_plain(self, assembly: Assembly, part: Part, chunk: Chunk, reply: Reply) -> tuple[int, Sequence[Frame]]:
        """How many of the rows the reply is about, and its frames but for those of the plain columns."""
        done, split = reply.header.get("rows"), reply.header.get("split")
        if not (isinstance(done, int) and isinstance(split, int) and 0 < done <= len(chunk.rows) and split >= 0):
            raise PeerError(f"worker {part.source!r} gave {done!r} of {len(chunk.rows)} rows")
        schema = plain_schema(assembly.schema, part.lengths)
        if chunk.plain and len(schema):
            table = from_frames(reply.header.get("plain", {}), reply.frames[:split], schema)
            if table.num_rows != done:
                raise PeerError(f"worker {part.source!r} gave {table.num_rows} rows instead of {done}")
            assembly.put_plain(part.places[chunk.rows[:done]], table)
        return done, reply.frames[split:]
