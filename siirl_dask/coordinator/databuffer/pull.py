"""Pulls a worker's share of an edge: fetches its rows from their sources into one table, in its
final order.

The puller first learns how long its rows are, allocates its result in memory that it keeps for
reuse, and then has each row put into its place (``fetch``). What a source of this host shares is
read where it lies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.acks import Acks
from siirl_dask.coordinator.databuffer.arena import Arena
from siirl_dask.coordinator.databuffer.early import EarlyBatch
from siirl_dask.coordinator.databuffer.fetch import LEAST_IN_FLIGHT, RowFetcher
from siirl_dask.coordinator.databuffer.limits import BufferLimits, CopyThreads, Traffic
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.receive_buffer import ReceiveBuffer, SourceRows
from siirl_dask.coordinator.databuffer.row_lengths import (
    MAX_ROW_ELEMENTS,
    RowOrigin,
    other_columns_schema,
)
from siirl_dask.coordinator.databuffer.shared_tables import SharedTableReader
from siirl_dask.coordinator.transport.messages import (
    Op,
    Request,
    TransitionKey,
    Transport,
    pack_ints,
    unpack_ints,
)
from siirl_dask.coordinator.transport.peers import gather_or_cancel
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge
from siirl_dask.tables import Ints

# messages into a worker: each has a connection, which carries 1 Gbit/s over a link of 10 ms
_IN_FLIGHT = 16


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
        self._copy_threads = copy_threads
        self.acks = Acks(transport)
        self._shared_tables = SharedTableReader(worker, own_published, self.acks, transport_mode)
        self._fetcher = RowFetcher(
            worker=worker,
            transport=transport,
            own_published=own_published,
            copy_threads=copy_threads,
            limits=limits,
            transport_mode=transport_mode,
            traffic=traffic,
        )
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
            in_flight = max(LEAST_IN_FLIGHT, _IN_FLIGHT // max(1, sources))
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
            return published.columns().group_lengths(positions)
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
            await self._fetcher.fetch(buffer, rows, in_flight)
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
            *(
                self._fetcher.fetch(buffer, part, in_flight)
                for part in to_fetch
                if len(part.positions)
            ),
            *(
                self._copy_threads.run(batch.nbytes, buffer.copy_early, rows, batch)
                for batch in batches
            ),
        )
        self.traffic.early += buffer.ragged_bytes(arrived) - buffer.ragged_bytes(remaining)

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
