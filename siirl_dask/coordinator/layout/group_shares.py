"""The groups that a worker pulls, of an edge that takes one row of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, PullShare, assign_owners
from siirl_dask.errors import DataError
from siirl_dask.planner import Edge, Hosts, Rows
from siirl_dask.schema import GROUP_ID, IDENTITY
from siirl_dask.tables import Ints, missing_groups


@dataclass(frozen=True, slots=True)
class GroupShare:
    """The groups of an edge that one worker has rows of."""

    share: PullShare
    """The rows of the source with these groups."""
    acks: Mapping[int, int]
    """Rows that the worker acks, by source: its own, and those that have fewer takers than there
    are targets. All targets together ack each row once per target."""

    def without(self, groups: Ints) -> PullShare:
        """Return the share without ``groups``, which the worker has already."""
        share = self.share
        remaining = np.flatnonzero(~np.isin(share.identity[GROUP_ID].to_numpy(), groups))
        positions = {}
        destinations = {}
        for source, places in share.destinations.items():
            wanted = np.isin(places, remaining)
            if wanted.any():
                positions[source] = share.positions[source][wanted]
                destinations[source] = np.searchsorted(remaining, places[wanted])
        identity = share.identity.take(pa.array(remaining))
        return PullShare(share.row_ids[remaining], positions, destinations, identity)


def group_share(
    edge: Edge,
    worker: str,
    guide: Edge,
    guide_rows: EdgeStatistics,
    edge_rows: EdgeStatistics,
    quadratic_from: int,
    hosts: Hosts | None,
) -> GroupShare | PullShare:
    """Return the groups of ``edge`` of which the worker owns a row, by the statistics of ``guide``;
    for a replicated edge plain rows, one of each group.

    DataError when the guide has rows of groups that the edge has not.
    """
    # of several rows of a group the first one counts
    groups, first = np.unique(edge_rows.groups, return_index=True)
    wanted = np.unique(guide_rows.groups)
    unknown = np.setdiff1d(wanted, groups)
    if len(unknown):
        columns = [name for name in edge.schema.names if name not in IDENTITY]
        raise DataError(f"edge {edge.name}: {missing_groups(unknown, columns, edge.source)}")
    if edge.rows is Rows.REPLICATED:
        rows = np.sort(first[np.isin(groups, wanted)])
        return PullShare.of(edge_rows, rows)
    owner = assign_owners(guide, guide_rows, quadratic_from, hosts)
    this_worker = edge.targets.index(worker)
    targets = len(edge.targets)
    row_count = len(edge_rows.groups)
    # each pair of a group and a target that owns a row of the group, once
    pairs = np.unique(np.searchsorted(groups, guide_rows.groups) * targets + owner)
    taken = first[pairs // targets]
    taker = pairs % targets
    takers = np.bincount(taken, minlength=row_count)
    # One target acks a row for those targets too that do not take it: the last that takes it, or
    # any if none does.
    acks_for_others = np.arange(row_count) % targets
    acks_for_others[taken] = taker
    own = taken[taker == this_worker]
    own_acks = np.bincount(own, minlength=row_count)
    other_acks = np.where(acks_for_others == this_worker, targets - takers, 0)
    by_source = np.bincount(
        edge_rows.sources, weights=own_acks + other_acks, minlength=len(edge.sources)
    )
    return GroupShare(
        share=PullShare.of(edge_rows, np.sort(own)),
        acks={source: int(count) for source, count in enumerate(by_source) if count},
    )
