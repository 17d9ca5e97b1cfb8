"""Early traffic of one worker: rows that it sends, and rows that it receives, before their table is
whole.

While a node makes rows, a link would be idle until the last one is there, and then all rows would
move at once. Where the node hands over what it has finished, each row moves meanwhile to the target
that it prefers (see ``layout.balance``). The owners are computed afterwards from all rows as
ever, so early rows change nothing but what is still to be fetched; a row that went to another
target than its owner is dropped there and fetched by the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siirl_dask.comms.wire import Frame
from siirl_dask.coordinator.databuffer.early_rows import EarlyRows
from siirl_dask.coordinator.databuffer.limits import Allowance, CopyThreads, Traffic
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.ragged import element_width
from siirl_dask.coordinator.databuffer.row_lengths import MAX_ROW_ELEMENTS
from siirl_dask.coordinator.layout.balance import early_targets
from siirl_dask.coordinator.transport.messages import (
    Op,
    Reply,
    Request,
    TransitionKey,
    Transport,
    unpack_ints,
)
from siirl_dask.errors import PeerError, SiirlError
from siirl_dask.planner import Edge, Hosts
from siirl_dask.schema import ROW_ID
from siirl_dask.tables import Ints

logger = logging.getLogger("siirl_dask.coordinator")
_MAX_ROWS = 2**20  # rows in a message: a peer that sends more of them, all empty, is refused
_MAX_ROW_ID = 2**62
# times the bytes that are worth a message: a message of long rows may have so many
_MAX_MESSAGE = 64


class EarlyTraffic:
    """One worker's early rows, of all edges and iterations. Belongs to the event loop.

    Args:
        prefetch: See ``data.prefetch``.
        memory: Bytes for rows that wait here to travel, or wait here for their owner to be known.
        message_bytes: Bytes of rows that are worth a message.
    """

    def __init__(
        self,
        *,
        worker: str,
        hosts: Hosts,
        transport: Transport,
        traffic: Traffic,
        copy_threads: CopyThreads,
        prefetch: bool | None,
        memory: int,
        message_bytes: int,
    ) -> None:
        self._worker = worker
        self._hosts = hosts
        self._transport = transport
        self._traffic = traffic
        self._copy_threads = copy_threads
        self._prefetch = prefetch
        self._message_bytes = message_bytes
        self.allowance = Allowance(memory)
        self._outgoing: dict[TransitionKey, EarlyRows] = {}
        self._incoming: dict[TransitionKey, EarlyPull] = {}
        self._closed = False

    def leaves(self, edge: Edge) -> bool:
        """Return whether rows of an edge can leave this worker early."""
        if not _early_columns(edge):
            return False
        return bool(early_targets(edge, self._worker, self._hosts, prefetch=self._prefetch))

    def moves(self, edge: Edge) -> bool:
        """Return whether rows of an edge can leave this worker or arrive at it early."""
        if self.leaves(edge):
            return True
        return bool(self._early_sources(edge))

    def hand_over(self, edge: Edge, key: TransitionKey, rows: pa.Table) -> None:
        """Offer finished rows to the targets that they prefer."""
        self._rows(edge, key).add(rows)

    async def answer(self, edge: Edge, request: Request) -> Reply:
        """Send a target the next rows. PeerError where the edge has no rows that leave this
        worker early.
        """
        if not self.leaves(edge):
            raise PeerError(
                f"asked for early rows of edge {request.key.edge}, of which worker "
                f"{self._worker!r} has none"
            )
        return await self._rows(edge, request.key).answer(request.body)

    async def published(self, edge: Edge, key: TransitionKey, published: Published) -> None:
        """Stop sending early: all rows of a key can be pulled. NodeError when rows that left
        early are others there.
        """
        if not self.leaves(edge):
            return
        # made here if nobody has asked yet: who asks later learns that there are no more
        rows = self._rows(edge, key)
        rows.close()
        if published.table is not None:
            ids = published.statistics[ROW_ID].tolist()
            columns = published.columns().ragged
            await self._copy_threads.run(published.nbytes, rows.check, ids, columns)

    def prefetch(self, edge: Edge, key: TransitionKey) -> None:
        """Begin to ask for the rows of an edge that will probably be this worker's."""
        sources = self._early_sources(edge)
        if not sources or key in self._incoming or self._closed:
            return
        self._incoming[key] = EarlyPull(
            edge=edge,
            key=key,
            target=edge.targets.index(self._worker),
            sources=sources,
            columns=_early_columns(edge),
            transport=self._transport,
            traffic=self._traffic,
            allowance=self.allowance,
            message_bytes=self._message_bytes,
        )

    @asynccontextmanager
    async def arrived(
        self, key: TransitionKey
    ) -> AsyncIterator[Mapping[str, Sequence[EarlyBatch]]]:
        """Yield what has arrived of a key, by source; it is freed afterwards. All sources have
        published.
        """
        pull = self._incoming.get(key)
        if pull is None:
            yield {}
            return
        try:
            yield await pull.finish()
        finally:
            self._incoming.pop(key, pull).drop()

    def forget(self, before: int) -> None:
        """Drop everything of iterations before sequence number ``before``."""
        for key in [key for key in self._outgoing if key.sequence < before]:
            self._outgoing.pop(key).close()
        for key in [key for key in self._incoming if key.sequence < before]:
            self._incoming.pop(key).drop()

    def close(self) -> None:
        """Stop asking and answering, and free all rows."""
        self._closed = True
        for rows in self._outgoing.values():
            rows.close()
        for pull in self._incoming.values():
            pull.drop()
        self._incoming.clear()

    def _early_sources(self, edge: Edge) -> list[str]:
        """Return the sources of an edge that rows can arrive from early."""
        if not _early_columns(edge):
            return []
        sources = []
        for source in edge.sources:
            targets = early_targets(edge, source, self._hosts, prefetch=self._prefetch)
            if self._worker in targets.values():
                sources.append(source)
        return sources

    def _rows(self, edge: Edge, key: TransitionKey) -> EarlyRows:
        """Return the rows of a key, made for whoever is first: the node or a target."""
        if key not in self._outgoing:
            rows = EarlyRows(
                edge=edge,
                source=edge.sources.index(self._worker),
                columns=_early_columns(edge),
                targets=early_targets(edge, self._worker, self._hosts, prefetch=self._prefetch),
                message_bytes=self._message_bytes,
                allowance=self.allowance,
            )
            if self._closed:
                rows.close()
            self._outgoing[key] = rows
        return self._outgoing[key]


def _early_columns(edge: Edge) -> list[str]:
    """Return the edge's columns that travel early: variable-length ones, which are heavy and lie
    row by row.
    """
    declared = edge.early.columns if edge.early else ()
    return [name for name in declared if element_width(edge.schema.field(name).type) is not None]


@dataclass(frozen=True, slots=True)
class EarlyBatch:
    """Rows that arrived in one message."""

    row_ids: Ints
    """[rows] in the order in which they arrived."""
    lengths: Mapping[str, Ints]
    """[rows] elements, by column."""
    frames: Mapping[str, Frame]
    """Bytes of the rows one after the other, by column."""

    @property
    def nbytes(self) -> int:
        return sum(memoryview(frame).nbytes for frame in self.frames.values())


class EarlyPull:
    """Rows of one edge and iteration that arrive early at this worker. Belongs to the event loop.

    ``sources`` are asked for ``columns``; what arrives counts against ``allowance`` until it is
    dropped.
    """

    def __init__(
        self,
        *,
        edge: Edge,
        key: TransitionKey,
        target: int,
        sources: Sequence[str],
        columns: Sequence[str],
        transport: Transport,
        traffic: Traffic,
        allowance: Allowance,
        message_bytes: int,
    ) -> None:
        self._key = key
        self._target = target
        self._widths = {name: element_width(edge.schema.field(name).type) or 0 for name in columns}
        self._transport = transport
        self._traffic = traffic
        self._allowance = allowance
        share = allowance.limit // (2 * max(1, len(sources)))
        self._limit = max(1, min(_MAX_MESSAGE * message_bytes, share))
        self._batches: dict[str, list[EarlyBatch]] = {source: [] for source in sources}
        self._asking = [asyncio.create_task(self._ask(source)) for source in sources]

    async def finish(self) -> Mapping[str, Sequence[EarlyBatch]]:
        """Return what has arrived, by source. All sources have published, so each soon answers
        that it is done.
        """
        done, _ = await asyncio.wait(self._asking)
        for task in done:
            # it is when the run is stopped; whoever waits learns of that elsewhere
            if not task.cancelled():
                task.result()
        return self._batches

    def drop(self) -> int:
        """Ask no more, free what has arrived, and return its bytes."""
        for task in self._asking:
            task.cancel()
        nbytes = sum(batch.nbytes for batches in self._batches.values() for batch in batches)
        self._allowance.give(nbytes)
        self._batches = {}
        return nbytes

    async def _ask(self, source: str) -> None:
        """Ask a source for message after message until it has no more, or no memory is left for
        another.
        """
        number = 0
        try:
            while self._allowance.take(self._limit):
                batch = None
                try:
                    batch = await self._next(source, number)
                finally:
                    received = 0 if batch is None else batch.nbytes
                    self._allowance.give(self._limit - received)
                if batch is None:
                    return
                self._batches[source].append(batch)
                number += 1
        except (
            SiirlError
        ) as error:  # no failure: whatever has not arrived is pulled with the other rows
            logger.info("rows of worker %r come when their table is whole: %s", source, error)

    async def _next(self, source: str, number: int) -> EarlyBatch | None:
        """Return the source's next message; None when it has no more."""
        body = {"target": self._target, "number": number, "limit": self._limit}
        reply = await self._transport.request(source, Request(Op.EARLY, self._key, body))
        self._traffic.add_message(source, reply.nbytes)
        return self._read(source, reply) if reply.header.get("rows") else None

    def _read(self, source: str, reply: Reply) -> EarlyBatch:
        """Return the rows in a reply. PeerError when it is malformed or larger than was asked
        for.
        """
        row_ids = unpack_ints(reply.header.get("rows"), _MAX_ROW_ID, _MAX_ROWS)
        announced = reply.header.get("lengths")
        if not isinstance(announced, list | tuple) or not len(announced) == len(
            reply.frames
        ) == len(self._widths):
            raise PeerError(
                f"worker {source!r} sent {len(reply.frames)} early columns: expected "
                f"{[*self._widths]}"
            )
        if reply.nbytes > self._limit or len(np.unique(row_ids)) < len(row_ids):
            raise PeerError(
                f"worker {source!r} sent {reply.nbytes} bytes of early rows: expected "
                f"{self._limit} at most"
            )
        lengths = {
            name: unpack_ints(values, MAX_ROW_ELEMENTS, len(row_ids))
            for name, values in zip(self._widths, announced, strict=True)
        }
        frames = dict(zip(self._widths, reply.plain_frames(), strict=True))
        for name, width in self._widths.items():
            size = memoryview(frames[name]).nbytes
            if len(lengths[name]) != len(row_ids) or int(lengths[name].sum()) * width != size:
                raise PeerError(
                    f"worker {source!r} sent {size} bytes of early {name!r}: its lengths say "
                    "otherwise"
                )
        return EarlyBatch(row_ids, lengths, frames)
