"""Pulls a worker's share of an edge: fetches its rows from their sources into one table, in its
final order.

The puller first learns how long its rows are, allocates its result in memory that it keeps for
reuse, and then has each row put into its place: a source on the same host writes it there, any
other sends it in messages, several of them in flight. What a source of this host shares is read
where it lies. ``serving`` answers these requests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.comms.wire import Frame, Pieces, nbytes_of
from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.arena import Arena
from siirl_dask.coordinator.databuffer.early import EarlyBatch
from siirl_dask.coordinator.databuffer.limits import Budget, BufferLimits, CopyThreads, Traffic
from siirl_dask.coordinator.databuffer.published import Acks, Published
from siirl_dask.coordinator.databuffer.receive_buffer import ReceiveBuffer, RowRequest, SourceRows
from siirl_dask.coordinator.databuffer.row_lengths import (
    MAX_ROW_ELEMENTS,
    RowOrigin,
    other_columns_schema,
)
from siirl_dask.coordinator.databuffer.shared_tables import SharedTableReader
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.messages import (
    Op,
    Reply,
    Request,
    TransitionKey,
    Transport,
    from_frames,
    pack_ints,
    unpack_ints,
)
from siirl_dask.coordinator.transport.peers import gather_or_cancel
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge
from siirl_dask.tables import Ints

logger = logging.getLogger("siirl_dask.coordinator")
# messages into a worker: each has a connection, which carries 1 Gbit/s over a link of 10 ms
_IN_FLIGHT = 16
_LEAST_IN_FLIGHT = 2  # messages per source: one arrives while the other is copied
# rounds of messages in flight into which a source's rows are cut: all of a round arrive at the
# same time and are copied afterwards, so with a single round nothing would arrive meanwhile
_ROUNDS = 2
_LEAST_MESSAGE = 2**20  # bytes: rows are cut into no smaller messages
# rows that a source is asked to write at once: their places travel with the request
_MAX_WRITTEN_ROWS = 2**16


class Puller:
    """Makes one worker's pulls. Belongs to the event loop; only copies of rows leave it, for
    ``CopyThreads``.
    """

    def __init__(
        self,
        worker: str,
        transport: Transport,
        own_published: Callable[[TransitionKey], Awaitable[Published]],
        arena: Arena,
        copy_threads: CopyThreads,
        limits: BufferLimits,
        transport_mode: TransportMode,
        traffic: Traffic,
    ) -> None:
        """``own_published`` waits until this worker has published its rows of a transition, and
        returns them.
        """
        self._worker = worker
        self._transport = transport
        self._own_published = own_published
        self._arena = arena
        self._limits = limits
        self._transport_mode = transport_mode
        self._receiving = Budget(limits.memory // 8)
        # sources of this host that turned out not to reach this memory
        self._no_shared_memory: set[str] = set()
        self._copy_threads = copy_threads
        self.acks = Acks(transport)
        self._shared_tables = SharedTableReader(worker, own_published, self.acks, transport_mode)
        self.traffic = traffic

    async def pull(
        self,
        edge: Edge,
        origins: Sequence[RowOrigin],
        identity: pa.Table,
        *,
        ack: bool = True,
        early: Mapping[str, Sequence[EarlyBatch]] = MappingProxyType({}),
    ) -> pa.Table:
        """Return the rows of the origins in the order of ``identity``, which has their identity
        columns.

        Rows that arrived ``early``, by source, are not fetched again. Fetched rows are acked when
        all of them have arrived: until then every source keeps its part. Without ``ack`` the caller
        acks them later.
        """
        if not identity.num_rows:
            return edge.schema.empty_table()
        own_table = await self._own_table(origins, ack=ack)
        if own_table is not None:
            return own_table
        shared = []
        remaining = []
        for origin in origins:
            rows_in_place = await self._shared_tables.read(edge, origin)
            if rows_in_place is None:
                remaining.append(origin)
            else:
                shared.append(rows_in_place)
        fetched = await gather_or_cancel(*(self._source_rows(edge, one) for one in remaining))
        buffer = ReceiveBuffer(
            schema=edge.schema, identity=identity, sources=fetched, arena=self._arena, shared=shared
        )
        try:
            sources = sum(rows.source != self._worker for rows in fetched)
            in_flight = max(_LEAST_IN_FLIGHT, _IN_FLIGHT // max(1, sources))
            await gather_or_cancel(
                *(self._complete(buffer, rows, early, in_flight) for rows in fetched)
            )
        except BaseException:  # a cancelled pull as well
            for segment in buffer.segments():
                # a source that is slow may still write there, whenever it gets to it
                self._arena.retire(segment)
            buffer.discard()
            raise
        if ack:
            await self._ack(origins, fetched)
        for rows in shared:
            if rows.source != self._worker:
                self.traffic.add_shared(rows.source, rows.nbytes)
        # acked already: the bytes are this worker's, and are only joined and validated
        try:
            return await self._copy_threads.run(buffer.other_bytes, buffer.table)
        except pa.ArrowException as error:  # such as text that is not UTF-8
            buffer.discard()
            error.__traceback__ = None  # its frames refer to the memory
            raise PeerError(
                f"edge {edge.name}: what arrived is no table of {edge.schema.names}: {error}"
            ) from error

    async def ack(self, key: TransitionKey, rows: Mapping[str, int]) -> None:
        """Ack so many rows of each source."""
        for source, count in rows.items():
            if source == self._worker:
                published = await self._own_published(key)
                published.ack(count)
            else:
                self.acks.add(source, key, count)

    async def _own_table(self, origins: Sequence[RowOrigin], *, ack: bool) -> pa.Table | None:
        """Return the table that this worker published itself when it is all of the rows: nothing
        is copied.
        """
        if [origin.worker for origin in origins] != [self._worker]:
            return None
        positions = origins[0].positions
        published = await self._own_published(origins[0].key)
        if not np.array_equal(positions, np.arange(published.rows)) or published.table is None:
            return None
        table = published.table
        if ack:
            published.ack(len(positions))
        return table

    async def _source_rows(self, edge: Edge, origin: RowOrigin) -> SourceRows:
        """Return the rows to fetch from a worker, with their lengths, for which it may have to
        be asked.
        """
        announced = origin.lengths
        if announced is None:
            raise PeerError(
                f"edge {edge.name}: worker {origin.worker!r} told no lengths of its rows"
            )
        if announced.group_lengths is not None:
            lengths = announced.select(origin.positions)
        else:
            last_group = max(announced.offset_groups.values(), default=-1)
            groups = await self._ask_lengths(edge, origin, last_group)
            lengths = {name: groups[group] for name, group in announced.offset_groups.items()}
        return SourceRows(
            source=origin.worker,
            key=origin.key,
            positions=origin.positions,
            destinations=origin.destinations,
            lengths=lengths,
            other_row_bytes=announced.other_row_bytes,
            domain=announced.domain,
        )

    async def _ask_lengths(self, edge: Edge, origin: RowOrigin, last_group: int) -> Sequence[Ints]:
        """Return the lengths of a source's rows by offset group, from group 0 to ``last_group``
        at least.
        """
        worker = origin.worker
        positions = origin.positions
        if worker == self._worker:
            published = await self._own_published(origin.key)
            return published.group_lengths(positions)
        request = Request(Op.ROW_LENGTHS, origin.key, {"rows": pack_ints(positions)})
        reply = await self._transport.request(worker, request)
        groups = [
            unpack_ints(bytes(frame), MAX_ROW_ELEMENTS, len(positions)) for frame in reply.frames
        ]
        if len(groups) <= last_group or any(len(lengths) != len(positions) for lengths in groups):
            raise PeerError(
                f"edge {edge.name}: worker {worker!r} told the lengths of other rows than it was "
                "asked for"
            )
        return groups

    async def _complete(
        self,
        buffer: ReceiveBuffer,
        rows: SourceRows,
        early: Mapping[str, Sequence[EarlyBatch]],
        in_flight: int,
    ) -> None:
        """Put a source's rows into their places: copy what arrived early, and fetch the rest."""
        batches = []
        for batch in early.get(rows.source, ()):
            if batch.frames.keys() <= rows.lengths.keys():
                batches.append(batch)
        if not batches:
            await self._fetch(buffer, rows, in_flight)
            return
        early_ids = np.concatenate([batch.row_ids for batch in batches])
        has_arrived = np.isin(buffer.row_ids(rows), early_ids)
        missing = rows.select(np.flatnonzero(~has_arrived))
        arrived = rows.select(np.flatnonzero(has_arrived))
        # their columns that do not travel early
        remaining = replace(arrived, arrived=batches[0].frames.keys())
        to_fetch = [missing]
        if remaining.wanted or len(other_columns_schema(buffer.schema, rows.lengths)):
            to_fetch.append(remaining)
        await gather_or_cancel(  # what is fetched first: links wait for it
            *(self._fetch(buffer, part, in_flight) for part in to_fetch if len(part.positions)),
            *(
                self._copy_threads.run(batch.nbytes, buffer.copy_early, rows, batch)
                for batch in batches
            ),
        )
        self.traffic.early += buffer.ragged_bytes(arrived) - buffer.ragged_bytes(remaining)

    async def _fetch(self, buffer: ReceiveBuffer, rows: SourceRows, in_flight: int) -> None:
        """Fetch a source's rows into their places: from this worker itself, through shared
        memory, or in messages.
        """
        if rows.source == self._worker:
            size = buffer.ragged_bytes(rows) + len(rows.positions) * rows.other_row_bytes
            published = await self._own_published(rows.key)
            await self._copy_threads.run(size, buffer.copy_own, rows, published)
        elif buffer.ragged_bytes(rows) and self._shares_memory(rows):
            await self._fetch_by_write(buffer, rows)
        else:
            await self._fetch_by_messages(buffer, rows, in_flight)

    async def _ack(self, origins: Sequence[RowOrigin], fetched: Sequence[SourceRows]) -> None:
        """Ack the rows that are here now, for sources to free.

        Rows of shared tables are acked by their holds instead, except for this worker's own. Those
        count as acked at once: the table that was pulled keeps their memory.
        """
        for rows in fetched:
            if rows.source != self._worker:
                self.acks.add(rows.source, rows.key, len(rows.positions))
        for origin in origins:
            if origin.worker == self._worker:
                published = await self._own_published(origin.key)
                published.ack(len(origin.positions))

    def _shares_memory(self, rows: SourceRows) -> bool:
        """Return whether the source can write into this process's memory. PeerError when it must
        and cannot.
        """
        if self._transport_mode is TransportMode.dask:
            return False
        domain = shared_memory_domain()
        if domain and rows.domain == domain:
            return rows.source not in self._no_shared_memory
        if self._transport_mode is TransportMode.shm:
            raise PeerError(
                f"data.transport=shm, but worker {rows.source!r} shares no memory with "
                f"{self._worker!r}"
            )
        return False

    async def _fetch_by_write(self, buffer: ReceiveBuffer, rows: SourceRows) -> None:
        """Ask the source to write its rows to their places, as many at once as its other columns
        fit into a message.
        """
        rows_in_message = self._limits.message // max(1, rows.other_row_bytes)
        batch_rows = max(1, min(_MAX_WRITTEN_ROWS, rows_in_message))
        remaining = np.arange(len(rows.positions))
        while len(remaining):
            batch = remaining[:batch_rows]
            nbytes = buffer.ragged_bytes(rows, batch)
            request = RowRequest(rows=batch, columns=rows.wanted, others=True, nbytes=nbytes)
            reply = await self._request_rows(rows, request, buffer.write_target(rows, batch))
            if (reason := reply.header.get("cannot map")) is not None:
                if self._transport_mode is TransportMode.shm:
                    raise PeerError(
                        f"data.transport=shm, but worker {rows.source!r} cannot write here: "
                        f"{reason}"
                    )
                logger.warning("rows of worker %r come as messages: %s", rows.source, reason)
                self._no_shared_memory.add(rows.source)
                # all of them: to write some twice does no harm
                await self._fetch_by_messages(buffer, rows, _LEAST_IN_FLIGHT)
                return
            done, frames = self._take_others(buffer, rows, request, reply)
            expected = buffer.ragged_bytes(rows, remaining[:done])
            written = reply.header.get("written")
            if frames or written != expected:
                raise PeerError(
                    f"worker {rows.source!r} wrote {written!r} bytes: by the row lengths it told "
                    f"they are {expected}"
                )
            remaining = remaining[done:]
        self.traffic.add_shared(rows.source, buffer.ragged_bytes(rows))

    async def _fetch_by_messages(
        self, buffer: ReceiveBuffer, rows: SourceRows, in_flight: int
    ) -> None:
        """Receive a source's rows in messages, so many in flight at once, each within this
        worker's budget.
        """
        total = buffer.ragged_bytes(rows) + len(rows.positions) * rows.other_row_bytes
        share = max(_LEAST_MESSAGE, total // (_ROUNDS * in_flight))
        requests = buffer.split_into_requests(rows, min(self._limits.message, share))

        async def one_after_the_other() -> None:
            for request in requests:  # one iterator for all: whoever is done takes the next
                async with self._receiving.reserve(request.nbytes):
                    await self._fetch_message(buffer, rows, request)

        await gather_or_cancel(*(one_after_the_other() for _ in range(in_flight)))

    async def _fetch_message(
        self, buffer: ReceiveBuffer, rows: SourceRows, request: RowRequest
    ) -> None:
        """Receive the rows of one request, long ones into their places; where the source sends the
        first of them only, ask for the rest.
        """
        remaining = request
        while len(remaining.rows):
            places = partial(self._places, buffer, rows, remaining)
            reply = await self._request_rows(rows, remaining, None, places)
            done, frames = self._take_others(buffer, rows, remaining, reply)
            if len(frames) != len(remaining.columns):
                raise PeerError(
                    f"worker {rows.source!r} sent {len(frames)} columns: expected "
                    f"{remaining.columns}"
                )
            to_copy: dict[str, Frame] = {}
            for name, frame in zip(remaining.columns, frames, strict=True):
                if not isinstance(frame, Pieces):  # pieces have been received where they belong
                    to_copy[name] = frame
            nbytes = sum(nbytes_of(frame) for frame in to_copy.values())
            await self._copy_threads.run(
                nbytes, buffer.copy_frames, rows, remaining.rows[:done], to_copy
            )
            remaining = replace(remaining, rows=remaining.rows[done:])

    def _places(
        self,
        buffer: ReceiveBuffer,
        rows: SourceRows,
        request: RowRequest,
        header: object,
        sizes: Sequence[int],
    ) -> list[Pieces | None]:
        """Return where the frames of a reply belong. PeerError, before a byte of them has come, for
        other rows or columns than were asked for.
        """
        known_header = header if isinstance(header, dict) else {}
        done, split = self._part(rows, request, known_header)
        if len(sizes) != split + len(request.columns):
            raise PeerError(
                f"worker {rows.source!r} sent {len(sizes) - split} columns: expected "
                f"{request.columns}"
            )
        others: list[Pieces | None] = [None] * split
        return others + buffer.places(rows, request.rows[:done], request.columns, sizes[split:])

    async def _request_rows(
        self,
        rows: SourceRows,
        request: RowRequest,
        target: dict[str, Any] | None,
        places: Callable[[object, Sequence[int]], Sequence[Pieces | None]] | None = None,
    ) -> Reply:
        """Ask a source for rows: to write them to ``target``, or without one to send them."""
        positions = pack_ints(rows.positions[request.rows])
        body = {
            "rows": positions,
            "columns": list(request.columns),
            "others": request.others,
            "target": target,
        }
        row_bytes = request.nbytes if target is None else 0
        reply = await self._transport.request(
            rows.source, Request(Op.FETCH, rows.key, body, row_bytes, places)
        )
        self.traffic.add_message(rows.source, reply.nbytes)
        return reply

    def _take_others(
        self, buffer: ReceiveBuffer, rows: SourceRows, request: RowRequest, reply: Reply
    ) -> tuple[int, Sequence[Frame | Pieces]]:
        """Take the other columns out of a reply. Return how many rows it is about, and the
        frames after those.
        """
        done, split = self._part(rows, request, reply.header)
        schema = other_columns_schema(buffer.schema, rows.lengths)
        if request.others and len(schema):
            others = Reply(reply.header, reply.frames[:split]).plain_frames()
            table = from_frames(reply.header.get("others", {}), others, schema)
            if table.num_rows != done:
                raise PeerError(
                    f"worker {rows.source!r} gave {table.num_rows} rows instead of {done}"
                )
            buffer.add_others(rows.destinations[request.rows[:done]], table)
        return done, reply.frames[split:]

    def _part(
        self, rows: SourceRows, request: RowRequest, header: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Return how many of the rows a reply is about, and the number of frames before theirs."""
        done = header.get("rows")
        split = header.get("split")
        match done, split:
            case int(), int() if 0 < done <= len(request.rows) and split >= 0:
                return done, split
        raise PeerError(f"worker {rows.source!r} gave {done!r} of {len(request.rows)} rows")
