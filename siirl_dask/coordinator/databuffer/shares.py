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


@dataclass(frozen=True, kw_only=True, slots=True)
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
        """Return this worker's rows, and the row lengths that arrived with the statistics."""
        share, lengths = await self._of(edge, key, guide, guide_key)
        if isinstance(share, GroupShare):
            share = share.share
        return share, lengths

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
