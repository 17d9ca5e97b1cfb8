"""Pulls the groups of an edge by group: those that this worker has already are taken from its own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.blobs import rows_at
from siirl_dask.coordinator.databuffer.pull import Puller
from siirl_dask.coordinator.databuffer.row_lengths import RowLengths, RowOrigin
from siirl_dask.coordinator.layout.balance import Ints
from siirl_dask.coordinator.layout.groups import GroupShare
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.planner import Edge
from siirl_dask.schema import GROUP_ID


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
        _first_of(table.select(edge.schema.names).cast(edge.schema), wanted) for table in already_here if table.num_rows
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
    known, first_rows = np.unique(row_groups, return_index=True)  # the same group may be in several tables
    row_of_group = dict(zip(known.tolist(), first_rows.tolist(), strict=True))
    return rows_at(rows, np.array([row_of_group[group] for group in wanted.tolist()], dtype=np.intp))


def _first_of(table: pa.Table, wanted: Ints) -> pa.Table:
    """Return the first row of each wanted group that a table has."""
    groups = table[GROUP_ID].to_numpy()
    known, first = np.unique(groups, return_index=True)
    return rows_at(table, np.sort(first[np.isin(known, wanted)]))
