"""The Databuffer: one worker's end of the data plane. It publishes this worker's rows and pulls
those it needs next.

A row's way from the worker that made it to the worker that needs it:

publish
    The source stores its table under an immutable key; nothing is sent (``published``;
    shared rows: ``shared_tables``).
gather
    The target learns the statistics of all rows: id, group, tokens (``shares``).
assign
    The target computes, as every target does, which rows are its own and who has them (``shares``,
    ``layout``).
lengths
    The target learns how long its rows are, mostly along with the statistics (``row_lengths``).
early
    Rows that a source has finished while it makes others may have arrived before that (``early``).
relay
    One target of a host takes replicated rows over the link, its neighbours from it (``relay``).
lay out
    The target allocates its result, each row in its final place (``receive_buffer``, ``arena``).
fetch
    The target asks each source, which writes the rows there or sends them (``pull``, ``fetch``,
    ``row_server``).
read
    Rows that a source of the same host shares stay where they are (``shared_tables``).
by group
    Blobs are fetched once for each group of the target's rows, if they are not here already
    (``shares``).
ack
    The target acks the rows at their sources, which free them (``acks``).

Requests between workers go through ``transport``. All of them but the ack are reads, which can be
repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import pyarrow as pa

from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.arena import Arena
from siirl_dask.coordinator.databuffer.early import EarlyTraffic
from siirl_dask.coordinator.databuffer.limits import BufferLimits, CopyThreads, Traffic
from siirl_dask.coordinator.databuffer.published import Published, spill
from siirl_dask.coordinator.databuffer.pull import Puller
from siirl_dask.coordinator.databuffer.relay import Relays, relay_of
from siirl_dask.coordinator.databuffer.row_server import RowServer
from siirl_dask.coordinator.databuffer.serving import ExpectedKeys, PublishedSlots, Window
from siirl_dask.coordinator.databuffer.shares import (
    GatheredStatistics,
    Shares,
    StatisticsTree,
    pull_groups,
)
from siirl_dask.coordinator.layout.assignment import row_statistics
from siirl_dask.coordinator.layout.group_shares import GroupShare
from siirl_dask.coordinator.layout.host_routes import count_takers
from siirl_dask.coordinator.transport.messages import (
    Op,
    Reply,
    Request,
    TransitionKey,
    Transport,
    check_types,
    pack_ints,
    unpack_ints,
)
from siirl_dask.errors import Aborted, DataError, PeerError, SilentPeer
from siirl_dask.planner import Edge, Hosts, Iteration, Rows, host_of
from siirl_dask.tables import one_of_each_group

_AHEAD = 16  # iterations that peers may be ahead, where nobody knows better


class Databuffer:
    """Publishes and pulls one worker's rows, and answers its peers. Lives on the event loop that
    serves them.

    Args:
        edges: The run's edges, by ``phase/name``.
        quadratic_from: See ``assign_owners``.
        hosts: Host of each worker, as planned; None: all are on one.
        prefetch: See ``data.prefetch``.
        window: The iterations that peers may name; None: a few from those on that this worker is
            in.

    A table may be published and pulled in parts, by number, each like a table of its own.
    """

    def __init__(
        self,
        run: str,
        worker: str,
        edges: Mapping[str, Edge],
        transport: Transport,
        *,
        transport_mode: TransportMode = TransportMode.auto,
        limits: BufferLimits | None = None,
        quadratic_from: int = 0,
        hosts: Hosts | None = None,
        prefetch: bool | None = None,
        window: Window | None = None,
    ) -> None:
        for edge in edges.values():
            check_types(edge.schema)
        self._run = run
        self._worker = worker
        if window is None:
            window = Window(_AHEAD)
        self._expected = ExpectedKeys(run, edges, window)
        self._limits = BufferLimits() if limits is None else limits
        self._slots = PublishedSlots()
        self._statistics_tree = StatisticsTree(worker, transport, self._own_statistics)
        self._transport_mode = transport_mode
        self._hosts = {} if hosts is None else hosts
        self._copy_threads = CopyThreads()
        self._shares = Shares(
            worker=worker,
            statistics=self._statistics_tree,
            copy_threads=self._copy_threads,
            quadratic_from=quadratic_from,
            hosts=self._hosts,
        )
        self.traffic = Traffic(worker, self._hosts)
        """Bytes that this worker has received, by the way they travelled."""
        early_memory = self._limits.memory // 8
        self._early = EarlyTraffic(
            worker=worker,
            hosts=self._hosts,
            transport=transport,
            traffic=self.traffic,
            copy_threads=self._copy_threads,
            prefetch=prefetch,
            memory=early_memory,
            message_bytes=self._limits.early_message,
        )
        reusable_memory = self._limits.memory // 2
        if any(self._early.moves(edge) for edge in edges.values()):
            reusable_memory -= early_memory
        self.arena = Arena(keep=reusable_memory)
        self._row_server = RowServer(self.arena, self._copy_threads, self._limits)
        self._puller = Puller(
            worker=worker,
            transport=transport,
            own_published=self._slots.wait,
            arena=self.arena,
            copy_threads=self._copy_threads,
            limits=self._limits,
            transport_mode=transport_mode,
            traffic=self.traffic,
        )
        self._relays = Relays(
            worker=worker,
            hosts=self._hosts,
            transport=transport,
            puller=self._puller,
            slot=self._slots.slot,
            offer=partial(self._offer, shared=transport_mode is not TransportMode.dask),
            inline_lengths=self._limits.inline_lengths,
        )

    @property
    def unacked_bytes(self) -> int:
        """Bytes of published rows that this worker holds in memory until they are acked."""
        return sum(published.nbytes for published in self._slots.all_published())

    def key(self, edge: Edge, iteration: Iteration, part: int | None = None) -> TransitionKey:
        name = f"{iteration.plan}/{edge.name}"
        if part is not None:
            name = f"{name}/{part}"
        key = TransitionKey(self._run, iteration.sequence, name)
        self._expected.own(key, part)
        return key

    async def publish(
        self,
        edge: Edge,
        iteration: Iteration,
        table: pa.Table,
        part: int | None = None,
    ) -> None:
        """Offer ``table`` to the edge's targets, and its statistics to whoever lays out rows by
        them.
        """
        if edge.by_group:
            table = one_of_each_group(table)
        statistics = row_statistics(table, edge.sources.index(self._worker))
        moving = None
        if edge.moves and table.num_rows:
            moving = table.select(edge.schema.names)
            if not moving.schema.equals(edge.schema):
                moving = moving.cast(edge.schema)
        acks = table.num_rows * count_takers(self._worker, edge, self._hosts)
        published = Published(statistics, moving, unacked=acks)
        key = self.key(edge, iteration, part)
        await self._offer(key, published, shared=self._is_shared(edge))
        await self._early.published(edge, key, published)

    def leaves_early(self, edge: Edge) -> bool:
        """Return whether finished rows of an edge can leave this worker before it publishes
        them.
        """
        return self._early.leaves(edge)

    def hand_over(self, edge: Edge, iteration: Iteration, rows: pa.Table) -> None:
        """Send finished rows ahead of the table that will contain them, which is published
        later.
        """
        self._early.hand_over(edge, self.key(edge, iteration), rows)

    def prefetch(self, edges: Iterable[Edge], iteration: Iteration) -> None:
        """Begin to fetch rows of the edges that their sources have finished. The ``pull`` of
        each edge uses them.
        """
        for edge in edges:
            self._early.prefetch(edge, self.key(edge, iteration))

    async def _offer(self, key: TransitionKey, published: Published, *, shared: bool) -> None:
        """Make a published table available to peers; ``shared``: in memory that they can map, if
        that pays.
        """
        table = published.table
        if table is not None:
            if published.nbytes + self.unacked_bytes > self._limits.memory // 4:
                on_disk, mapping = await asyncio.to_thread(spill, table, self._limits.spill_folder)
                published.table = on_disk
                published.spilled = mapping
            elif shared:
                await self._copy_threads.run(
                    published.nbytes, published.share, self.arena, self._limits.share_from
                )
            # Split its columns up now: no peer waits for that yet, and no two threads can do it at
            # once.
            await self._copy_threads.run(published.bytes_in_chunks, published.columns)
        slot = self._slots.slot(key)
        if not slot.done():  # it is done when the run was aborted
            slot.set_result(published)

    async def wait_until_acked(self, edge: Edge, iteration: Iteration, part: int) -> None:
        """Wait until every target has acked a part that this worker published. Aborted when the
        run is stopped.
        """
        published = await self._slots.wait(self.key(edge, iteration, part))
        await published.all_acked.wait()
        if self._slots.aborted is not None:
            raise Aborted(self._slots.aborted)

    async def pull(
        self,
        edge: Edge,
        guide: Edge,
        iteration: Iteration,
        part: int | None = None,
        on_owned: Callable[[], object] = lambda: None,
        already_here: Sequence[pa.Table] = (),
    ) -> pa.Table:
        """Return this worker's rows of the edge, sorted by row id; ``guide``'s statistics decide
        which these are.

        By group these are a row of each group that it has rows of; groups in the tables
        ``already_here`` are taken from there. ``on_owned`` is called when all sources have made
        their rows, and these are known, before they are fetched. PeerError when a source cannot
        send them, DataError when a group is at no source, Aborted when the run is stopped.
        """
        key = self.key(edge, iteration, part)
        guide_key = self.key(guide, iteration, part)
        try:
            share, row_lengths = await self._shares.of(edge, key, guide, guide_key)
            on_owned()
            if isinstance(share, GroupShare):
                return await pull_groups(
                    self._puller,
                    edge,
                    key,
                    share,
                    row_lengths=row_lengths,
                    already_here=already_here,
                )
            origins = await self._relays.origins(
                edge, key, share, row_lengths, part=part is not None
            )
            async with self._early.arrived(key) as early:
                table = await self._puller.pull(edge, origins, share.identity, early=early)
            if part is not None:
                self._puller.acks.flush()  # the source makes the next part when this one is acked
            return table
        except SilentPeer as error:  # a PeerError that must stay one of a silent peer
            raise SilentPeer(f"{iteration}: {error}") from error
        except PeerError as error:
            raise PeerError(f"{iteration}: {error}") from error
        except DataError as error:
            raise DataError(f"{iteration}: {error}") from error

    async def handle(self, request: Request) -> Reply:
        """Answer a peer, as soon as this worker has published what is asked for.

        PeerError refuses requests of another run, of an iteration that is over, and for rows that
        were not published.
        """
        edge = self._expected.edge(request.key)
        # first: it may arrive when its iteration is forgotten and its rows are freed
        if request.op == Op.ACK:
            return self._take_acks(request.body.get("acks"))
        self._expected.check_iteration(request.key)
        _, relay = relay_of(request.key.edge)
        if request.op in (Op.SUBTREE_STATISTICS, Op.ALL_STATISTICS) and relay is None:
            return await self._statistics_tree.answer(edge, request)
        if request.op == Op.EARLY:
            return await self._early.answer(edge, request)
        published = await self._slots.wait(request.key)
        if request.op == Op.PASSED_ON:
            return self._relays.answer(published)
        positions = unpack_ints(request.body.get("rows"), published.rows, published.rows)
        if not len(positions) or request.op not in (Op.ROW_LENGTHS, Op.FETCH):
            raise PeerError(
                f"refused {request.op!r} of {len(positions)} rows of edge {request.key.edge}"
            )
        if request.op == Op.ROW_LENGTHS:
            lengths = published.columns().group_lengths(positions)
            return Reply({}, [pack_ints(lengths_of_group) for lengths_of_group in lengths])
        return await self._row_server.fetch(published, positions, request.body)

    async def wait_for_acks(self) -> None:
        """Wait until sources have received the acks of this worker. Runs need not: acks are sent
        anyway.
        """
        await self._puller.acks.wait()

    def forget(self, before: int) -> None:
        """Drop everything of iterations before sequence number ``before``, which all workers have
        completed.

        Tables that peers may still be reading in shared memory stay until they are acked, and go at
        a later call. Those that no peer asked for go at once, such as weights that a node with a
        lag skipped because the pipeline drained.
        """
        self._expected.forget(before)
        self._statistics_tree.forget(before)
        self._slots.forget(before)
        self._early.forget(before)
        self.arena.collect()

    def abort(self, reason: str) -> None:
        """Wake every wait, now and later, with Aborted."""
        self._puller.acks.close()
        self._early.close()
        self._slots.abort(reason)

    def close(self) -> None:
        """Release all memory, and the segments of peers."""
        self._statistics_tree.close()
        self._early.close()
        self._slots.clear()
        self._row_server.close()
        self._relays.close()
        self._puller.acks.close()
        self._copy_threads.close()

    def _is_shared(self, edge: Edge) -> bool:
        """Return whether one copy in shared memory replaces several: where peers on this host
        get the same rows.
        """
        if self._transport_mode is TransportMode.dask or edge.rows is not Rows.REPLICATED:
            return False
        here = host_of(self._worker, self._hosts)
        others = [target for target in edge.targets if target != self._worker]
        return sum(host_of(target, self._hosts) == here for target in others) > 1

    async def _own_statistics(self, key: TransitionKey) -> GatheredStatistics:
        """Wait until this worker has published, and return what every target learns about its
        rows.
        """
        published = await self._slots.wait(key)
        edge = self._expected.edge(key)
        if published.table is None:
            return GatheredStatistics(published.statistics)
        source = edge.sources.index(self._worker)
        max_bytes = self._limits.inline_lengths // len(edge.sources)
        lengths = published.row_lengths(source, max_bytes)
        return GatheredStatistics(published.statistics, {source: lengths})

    def _take_acks(self, acks: object) -> Reply:
        """Count a peer's acks. Those for an iteration that is forgotten are ignored: its rows
        are freed already. PeerError for what is no ack.
        """
        for item in acks if isinstance(acks, list | tuple) else [acks]:
            match item:
                case [int(sequence), str(edge), int(rows)] if rows > 0:
                    published = self._slots.find(TransitionKey(self._run, sequence, edge))
                    if published is not None:
                        published.ack(rows)
                case _:
                    raise PeerError(f"received {str(item)[:80]!r} for an ack")
        return Reply()
