"""Computes which rows of an edge are this worker's, once the statistics of all rows are gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from siirl_dask.coordinator.databuffer.allgather import StatisticsTree
from siirl_dask.coordinator.databuffer.limits import CopyThreads
from siirl_dask.coordinator.databuffer.row_lengths import RowLengths
from siirl_dask.coordinator.layout.assignment import EdgeStatistics, PullShare, pull_share
from siirl_dask.coordinator.layout.groups import GroupShare, group_share
from siirl_dask.coordinator.layout.routes import near_sources
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.planner import Edge, Hosts


@dataclass(frozen=True, slots=True)
class Shares:
    """One worker's shares of all edges. Belongs to the event loop."""

    worker: str
    statistics: StatisticsTree
    copy_threads: CopyThreads
    quadratic_from: int
    hosts: Hosts

    async def rows(
        self, edge: Edge, key: TransitionKey, guide: Edge, guide_key: TransitionKey
    ) -> tuple[PullShare, Mapping[int, RowLengths]]:
        """Return this worker's rows, and the row lengths that came with the statistics."""
        share, lengths = await self._of(edge, key, guide, guide_key)
        return share.share if isinstance(share, GroupShare) else share, lengths

    async def groups(
        self, edge: Edge, key: TransitionKey, guide: Edge, guide_key: TransitionKey
    ) -> tuple[GroupShare, Mapping[int, RowLengths]]:
        """Return this worker's groups of an edge by group, and the lengths of their rows at the source."""
        share, lengths = await self._of(edge, key, guide, guide_key)
        assert isinstance(share, GroupShare)
        return share, lengths

    async def _of(
        self, edge: Edge, key: TransitionKey, guide: Edge, guide_key: TransitionKey
    ) -> tuple[PullShare | GroupShare, Mapping[int, RowLengths]]:
        guiding = await self.statistics.gather(guide, guide_key)
        same = edge.name == guide.name
        moving = guiding if same else await self.statistics.gather(edge, key)

        def assign() -> PullShare | GroupShare:
            guide_rows = EdgeStatistics.from_rows(guiding.statistics)
            replicas = len(edge.sources) > 1 and bool(self.hosts)
            near = near_sources(self.worker, edge, self.hosts) if replicas else None
            edge_rows = guide_rows if same and near is None else EdgeStatistics.from_rows(moving.statistics, near)
            of_edge = group_share if edge.by_group else pull_share
            return of_edge(edge, self.worker, guide, guide_rows, edge_rows, self.quadratic_from, self.hosts)

        return await self.copy_threads.run(guiding.statistics.nbytes, assign), moving.row_lengths
