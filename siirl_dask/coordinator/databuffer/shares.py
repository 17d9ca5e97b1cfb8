"""Computes which rows of an edge are this worker's, once the statistics of all rows are gathered, and
pulls the groups of an edge by group: those that the worker has already come from its own tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.databuffer.allgather import StatisticsTree
from siirl_dask.coordinator.databuffer.limits import CopyThreads
from siirl_dask.coordinator.databuffer.pull import Puller
from siirl_dask.coordinator.databuffer.row_lengths import (
    RowLengths,
    RowOrigin,
)
from siirl_dask.coordinator.layout.assignment import (
    EdgeStatistics,
    GroupShare,
    PullShare,
    group_share,
    near_sources,
    pull_share,
)
from siirl_dask.coordinator.transport.messages import (
    TransitionKey,
)
from siirl_dask.planner import Edge, Hosts
from siirl_dask.schema import GROUP_ID
from siirl_dask.tables import Ints, rows_at


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
        """Return this worker's groups of an edge by group, and the lengths of their rows at the
        source.
        """
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
    await puller.ack(key, {edge.sources[source]: rows for source, rows in groups.acks.items()})
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
