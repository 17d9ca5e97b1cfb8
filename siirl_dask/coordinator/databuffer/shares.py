"""Gathers the statistics of all rows of an edge, and computes which of the rows are this worker's.

An all-gather over a tree of fan-out 16, in which members ask and nobody pushes. Members are the
edge's sources, then its other targets; the parent of member ``i`` is member ``(i - 1) // 16``.
Statistics go up among the sources, and the whole comes down to whoever asks. Each member asks its
parent once, however many ask it. A tree of fan-out 16 was measured best from 4 to 1,024 workers;
all-to-all does not finish at 128. Because members ask, a target that waits finds out when a peer is
gone: of a push that never arrives nobody learns.

The groups of an edge by group are pulled here as well: those that the worker has already come from
its own tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.databuffer.limits import CopyThreads
from siirl_dask.coordinator.databuffer.pull import Puller
from siirl_dask.coordinator.databuffer.row_lengths import (
    RowLengths,
    RowOrigin,
    pack_row_lengths,
    unpack_row_lengths,
)
from siirl_dask.coordinator.layout.assignment import (
    EdgeStatistics,
    PullShare,
    RowStatistics,
    pull_share,
    unpack_statistics,
)
from siirl_dask.coordinator.layout.group_shares import GroupShare, group_share
from siirl_dask.coordinator.layout.host_routes import near_sources
from siirl_dask.coordinator.transport.messages import (
    Op,
    Reply,
    Request,
    TransitionKey,
    Transport,
)
from siirl_dask.coordinator.transport.peers import gather_or_cancel
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge, Hosts
from siirl_dask.schema import GROUP_ID
from siirl_dask.tables import Ints, rows_at

FAN_OUT = 16


@dataclass(frozen=True)
class GatheredStatistics:
    """Statistics of the rows of one source, of the sources below a member of the tree, or of all
    sources.
    """

    statistics: RowStatistics
    row_lengths: Mapping[int, RowLengths] = field(default_factory=dict)
    """Lengths of the rows, by source; none for an edge that moves no rows."""

    @staticmethod
    def merge(parts: Sequence[GatheredStatistics]) -> GatheredStatistics:
        row_lengths: dict[int, RowLengths] = {}
        for part in parts:
            row_lengths.update(part.row_lengths)
        return GatheredStatistics(np.concatenate([part.statistics for part in parts]), row_lengths)

    @cached_property
    def reply(self) -> Reply:
        """The statistics as a message, packed once for everyone who asks."""
        headers, lengths = pack_row_lengths(self.row_lengths.values())
        return Reply({"row_lengths": headers}, [self.statistics.tobytes(), *lengths])


OwnStatistics = Callable[[TransitionKey], Coroutine[Any, Any, GatheredStatistics]]
"""Waits until this worker has published its rows of a transition, and returns their statistics."""


class StatisticsTree:
    """One worker as a member of the trees of all its edges. Belongs to the event loop."""

    def __init__(self, worker: str, transport: Transport, own: OwnStatistics) -> None:
        self._worker = worker
        self._transport = transport
        self._own = own
        self._tasks: dict[tuple[TransitionKey, Op], asyncio.Task[GatheredStatistics]] = {}

    async def gather(self, edge: Edge, key: TransitionKey) -> GatheredStatistics:
        """Return the statistics of every row of the edge, from all its sources."""
        return await self._once(edge, key, Op.ALL_STATISTICS)

    async def answer(self, edge: Edge, request: Request) -> Reply:
        """Answer a child or the parent. PeerError when this worker is no member of the edge's
        tree.
        """
        members = edge.sources if request.op == Op.SUBTREE_STATISTICS else _members(edge)
        if self._worker not in members:
            raise PeerError(
                f"worker {self._worker!r} has no part in the statistics of edge {edge.name}"
            )
        gathered = await self._once(edge, request.key, Op(request.op))
        return gathered.reply

    def forget(self, before: int) -> None:
        """Drop what was gathered in iterations before sequence number ``before``."""
        for key in [key for key in self._tasks if key[0].sequence < before]:
            self._tasks.pop(key).cancel()

    def close(self) -> None:
        """Give up whatever is still being gathered."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def _once(self, edge: Edge, key: TransitionKey, op: Op) -> asyncio.Future[GatheredStatistics]:
        """Start what is asked for, unless it is under way or done. One asker that is cancelled
        cancels no other's.
        """
        task = self._tasks.get((key, op))
        if task is None:
            gathering = self._gather_subtree if op is Op.SUBTREE_STATISTICS else self._ask_parent
            task = asyncio.create_task(gathering(edge, key))
            task.add_done_callback(_mark_as_seen)
            self._tasks[key, op] = task
        return asyncio.shield(task)

    async def _gather_subtree(self, edge: Edge, key: TransitionKey) -> GatheredStatistics:
        member = edge.sources.index(self._worker)
        first_child = FAN_OUT * member + 1
        children = edge.sources[first_child : first_child + FAN_OUT]
        request = Request(Op.SUBTREE_STATISTICS, key)
        parts = await gather_or_cancel(
            self._own(key), *(self._ask(edge, child, request) for child in children)
        )
        return GatheredStatistics.merge(parts)

    async def _ask_parent(self, edge: Edge, key: TransitionKey) -> GatheredStatistics:
        members = _members(edge)
        member = members.index(self._worker)
        if member == 0:  # the root: its subtree is all sources
            return await self._once(edge, key, Op.SUBTREE_STATISTICS)
        parent = members[(member - 1) // FAN_OUT]
        return await self._ask(edge, parent, Request(Op.ALL_STATISTICS, key))

    async def _ask(self, edge: Edge, worker: str, request: Request) -> GatheredStatistics:
        reply = await self._transport.request(worker, request)
        try:
            frames = reply.plain_frames()
            if not frames:
                raise PeerError("received no statistics")
            sources = len(edge.sources)
            statistics = unpack_statistics(frames[0], sources)
            headers = reply.header.get("row_lengths")
            row_lengths = unpack_row_lengths(headers, frames[1:], sources, edge.schema)
            return GatheredStatistics(statistics, row_lengths)
        except PeerError as error:
            raise PeerError(
                f"edge {edge.name}, {request.op} from worker {worker!r}: {error}"
            ) from error


def _members(edge: Edge) -> tuple[str, ...]:
    """Return the edge's sources, then its other targets: so the subtree of the first source has
    every source.
    """
    sources = set(edge.sources)
    return (*edge.sources, *(worker for worker in edge.targets if worker not in sources))


def _mark_as_seen(task: asyncio.Task[GatheredStatistics]) -> None:
    """Read the task's exception: where all who waited were cancelled first, asyncio would log it
    as never retrieved.
    """
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """One worker's shares of all edges. Belongs to the event loop."""

    worker: str
    statistics: StatisticsTree
    copy_threads: CopyThreads
    quadratic_from: int
    hosts: Hosts

    async def of(
        self,
        edge: Edge,
        key: TransitionKey,
        guide: Edge,
        guide_key: TransitionKey,
    ) -> tuple[PullShare | GroupShare, Mapping[int, RowLengths]]:
        """Return this worker's rows, or its groups of an edge by group, and the row lengths that
        arrived with the statistics.
        """
        of_guide = await self.statistics.gather(guide, guide_key)
        of_edge = of_guide
        if edge.name != guide.name:
            of_edge = await self.statistics.gather(edge, key)

        def assign() -> PullShare | GroupShare:
            near = None
            if len(edge.sources) > 1 and self.hosts:  # several sources may have the same row
                near = near_sources(self.worker, edge, self.hosts)
            guide_rows = EdgeStatistics.from_rows(of_guide.statistics)
            edge_rows = guide_rows
            if of_edge is not of_guide or near is not None:
                edge_rows = EdgeStatistics.from_rows(of_edge.statistics, near)
            compute = group_share if edge.by_group else pull_share
            return compute(
                edge=edge,
                worker=self.worker,
                guide=guide,
                guide_rows=guide_rows,
                edge_rows=edge_rows,
                quadratic_from=self.quadratic_from,
                hosts=self.hosts,
            )

        share = await self.copy_threads.run(of_guide.statistics.nbytes, assign)
        return share, of_edge.row_lengths


async def pull_groups(
    puller: Puller,
    edge: Edge,
    key: TransitionKey,
    groups: GroupShare,
    *,
    row_lengths: Mapping[int, RowLengths],
    already_here: Sequence[pa.Table],
) -> pa.Table:
    """Return a row of each group of the share, sorted by row id, and ack what the share says.

    Values that are in one of the tables ``already_here`` are not fetched, and not copied.
    """
    wanted: Ints = groups.share.identity[GROUP_ID].to_numpy()
    here = [
        _first_of(table.select(edge.schema.names).cast(edge.schema), wanted)
        for table in already_here
        if table.num_rows
    ]
    groups_here = [rows[GROUP_ID].to_numpy() for rows in here]
    share = groups.without(np.concatenate([np.zeros(0, np.int64), *groups_here]))
    origins = [
        RowOrigin(
            worker=edge.sources[source],
            key=key,
            positions=positions,
            destinations=share.destinations[source],
            lengths=row_lengths.get(source),
        )
        for source, positions in share.positions.items()
    ]
    fetched = await puller.pull(edge, origins, share.identity, ack=False)
    acks = {edge.sources[source]: rows for source, rows in groups.acks.items()}
    await puller.ack(key, acks)
    if not here:
        return fetched
    rows = pa.concat_tables([*here, fetched])
    row_groups = rows[GROUP_ID].to_numpy()
    # the same group may be in several tables
    known, first_rows = np.unique(row_groups, return_index=True)
    row_of_group = dict(zip(known.tolist(), first_rows.tolist(), strict=True))
    return rows_at(
        rows, np.array([row_of_group[group] for group in wanted.tolist()], dtype=np.intp)
    )


def _first_of(table: pa.Table, wanted: Ints) -> pa.Table:
    """Return the first row of each wanted group that a table has."""
    groups = table[GROUP_ID].to_numpy()
    known, first = np.unique(groups, return_index=True)
    return rows_at(table, np.sort(first[np.isin(known, wanted)]))
