"""Row statistics, and the assignment of rows to workers that follows from them.

A source publishes a few numbers per row: id, group, tokens, mini-batch. Whoever needs the layout of
a transition gathers those of all sources and computes the owners. The result depends on nothing
else, so every worker's is the same and nobody has to announce it. Rows of a worker that is a target
as well stay with it where the targets stay balanced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.comms.wire import Frame
from siirl_dask.coordinator.layout.balance import (
    NOWHERE,
    HostsOfRows,
    balance,
    balance_groups,
    balance_in_place,
    balance_minibatches,
    balance_near,
    preferred_targets,
    prefers,
    row_costs,
)
from siirl_dask.errors import DataError, PeerError
from siirl_dask.planner import Edge, Hosts, Rows, host_of
from siirl_dask.schema import GROUP_ID, MINIBATCH, ROW_ID, TOKENS
from siirl_dask.tables import Ints

_SOURCE = "source"
_POSITION = "position"
RowStatistics = NDArray[np.void]
"""Statistics of rows as they travel: [rows] records of ``STATISTICS``."""
STATISTICS = np.dtype(
    [(name, "<i8") for name in (ROW_ID, GROUP_ID, TOKENS)]
    + [(name, "<i4") for name in (MINIBATCH, _SOURCE, _POSITION)]
)
_BELOW = {TOKENS: 2**48, MINIBATCH: 2**31, _POSITION: 2**48}


def row_statistics(table: pa.Table, source: int) -> RowStatistics:
    """Return the statistics of a table that source number ``source`` of an edge publishes.

    DataError where a column that they are read from has nulls.
    """
    statistics = np.empty(table.num_rows, STATISTICS)
    statistics[MINIBATCH] = 0
    for name in (ROW_ID, GROUP_ID, TOKENS, MINIBATCH):
        if name == MINIBATCH and name not in table.column_names:
            continue
        if table[name].null_count:
            raise DataError(f"column {name!r} has nulls: every row must have one")
        statistics[name] = table[name].to_numpy()
    statistics[_SOURCE] = source
    statistics[_POSITION] = np.arange(table.num_rows)
    return statistics


def unpack_statistics(frame: Frame, sources: int) -> RowStatistics:
    """Return the statistics in a frame. PeerError when it holds none of an edge with that many
    sources.
    """
    if memoryview(frame).nbytes % STATISTICS.itemsize:
        raise PeerError(f"received {memoryview(frame).nbytes} bytes for statistics")
    statistics: RowStatistics = np.frombuffer(frame, STATISTICS)
    for name, below in (_BELOW | {_SOURCE: sources}).items():
        values: NDArray[Any] = statistics[name]
        if len(values) and (values.min() < 0 or values.max() >= below):
            raise PeerError(
                f"received statistics with {name} from {values.min()} to {values.max()}"
            )
    return statistics


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """Statistics of all rows of an edge, [rows] each, sorted by row id.

    A row that several sources hold is listed once, at one of them: so it moves once.
    """

    row_ids: Ints
    groups: Ints
    tokens: Ints
    minibatches: Ints
    sources: Ints
    """Index into the edge's sources."""
    positions: Ints
    """Index into what that source published."""

    @staticmethod
    def from_rows(
        statistics: RowStatistics, near: NDArray[np.bool_] | None = None
    ) -> EdgeStatistics:
        """Sort what was gathered. Its own order, which depends on the tree, does not show in the
        result.

        Of a row that several sources hold, one in ``near``, [sources], is listed where there is
        any.
        """
        sources = statistics[_SOURCE]
        far = np.zeros(len(statistics), np.bool_)
        if near is not None:
            far = ~near[sources]
        order = np.lexsort((sources, far, statistics[ROW_ID]))
        if len(order):
            ids = statistics[ROW_ID][order]
            is_first = np.concatenate(([True], ids[1:] != ids[:-1]))
            order = order[is_first]
        sorted_rows = statistics[order]
        return EdgeStatistics(
            row_ids=sorted_rows[ROW_ID].astype(np.int64),
            groups=sorted_rows[GROUP_ID].astype(np.int64),
            tokens=sorted_rows[TOKENS].astype(np.int64),
            minibatches=sorted_rows[MINIBATCH].astype(np.int64),
            sources=sources[order].astype(np.int64),
            positions=sorted_rows[_POSITION].astype(np.int64),
        )


def assign_owners(
    edge: Edge,
    rows: EdgeStatistics,
    quadratic_from: int = 0,
    hosts: Hosts | None = None,
) -> Ints:
    """Return each row's owner, as an index of the edge's targets. [rows] -> [rows]. Not for
    REPLICATED edges.

    ``rows`` are those of the guiding edge; ``quadratic_from``: see ``row_costs``; ``hosts``: host
    of each worker, where they are on several.
    """
    owners = len(edge.targets)
    if hosts is None:
        hosts = {}
    costs = row_costs(rows.tokens, quadratic_from)
    hosts_of_rows = _hosts_of_rows(edge, rows, hosts)
    preferred = prefers(edge, hosts)
    homes = preferred_targets(rows.groups, rows.sources, edge) if preferred else _homes(edge, rows)
    match edge.rows:
        case Rows.GROUPED:
            return balance_groups(costs, rows.groups, owners, homes, hosts_of_rows)
        case Rows.BALANCED if edge.by_minibatch:
            return balance_minibatches(costs, rows.minibatches, owners, homes, hosts_of_rows)
        case Rows.BALANCED:
            return balance_in_place(costs, owners, homes, hosts_of_rows)
        case Rows.ANYWHERE if preferred:
            return balance_in_place(costs, owners, homes)
        case Rows.ANYWHERE:
            return _stay_or_spread(costs, owners, homes, hosts_of_rows)
    raise AssertionError(f"{edge.rows} rows have no single owner")


def _homes(edge: Edge, rows: EdgeStatistics) -> Ints:
    """Return, for each row, its source's index among the targets; NOWHERE where the source is no
    target.
    """
    target_index = {worker: index for index, worker in enumerate(edge.targets)}
    of_source = np.array(
        [target_index.get(worker, NOWHERE) for worker in edge.sources], dtype=np.int64
    )
    return of_source[rows.sources]


def _hosts_of_rows(edge: Edge, rows: EdgeStatistics, hosts: Hosts) -> HostsOfRows | None:
    """Return the hosts of targets and rows; None where hosts make no difference to the owners.

    They make none where the targets are all on one host, or no row is on a target's host. Where no
    two workers share a host, a row's home already says all that its host would.
    """
    workers = {*edge.targets, *edge.sources}
    targets = [host_of(worker, hosts) for worker in edge.targets]
    sources = [host_of(worker, hosts) for worker in edge.sources]
    hosts_of_targets = set(targets)
    hosts_of_all = dict.fromkeys((*targets, *sources))
    if len(hosts_of_targets) == 1 or hosts_of_targets.isdisjoint(sources):
        return None
    if len(hosts_of_all) == len(workers):
        return None
    number = {host: index for index, host in enumerate(hosts_of_all)}
    of_source = np.array([number[host] for host in sources], dtype=np.int64)
    return HostsOfRows(
        owners=np.array([number[host] for host in targets], dtype=np.int64),
        items=of_source[rows.sources],
    )


def _stay_or_spread(costs: Ints, owners: int, homes: Ints, hosts: HostsOfRows | None) -> Ints:
    """Leave rows where their source is a target, and assign the others to the least loaded."""
    owner = homes.copy()
    away = homes == NOWHERE
    loads = np.zeros(owners, dtype=np.int64)
    np.add.at(loads, homes[~away], costs[~away])
    if hosts is None:
        owner[away] = balance(costs[away], owners, loads)
    else:
        owner[away] = balance_near(costs[away], owners, hosts.select(away), loads)
    return owner


@dataclass(frozen=True, slots=True)
class PullShare:
    """The rows of an edge that one worker pulls."""

    row_ids: Ints
    """[rows] ascending."""
    positions: dict[int, Ints]
    """[rows of a source] their positions in what it published, by source."""
    destinations: dict[int, Ints]
    """[rows of a source] the index of the same rows in ``row_ids``, and so in the result."""
    identity: pa.Table
    """The columns of the rows that are known from the statistics, in their order; these need not
    travel again."""

    @staticmethod
    def of(rows: EdgeStatistics, index: Ints) -> PullShare:
        """Return the share that has the rows at ``index``, ascending, of the edge whose
        statistics are ``rows``.
        """
        sources = rows.sources[index]
        destinations = {}
        for source in np.unique(sources).tolist():
            destinations[source] = np.flatnonzero(sources == source)
        positions = {}
        for source, places in destinations.items():
            positions[source] = rows.positions[index[places]]
        row_ids = rows.row_ids[index]
        identity = pa.table(
            {ROW_ID: row_ids, GROUP_ID: rows.groups[index], TOKENS: rows.tokens[index]}
        )
        return PullShare(row_ids, positions, destinations, identity)


def pull_share(
    edge: Edge,
    worker: str,
    guide: Edge,
    guide_rows: EdgeStatistics,
    edge_rows: EdgeStatistics,
    quadratic_from: int = 0,
    hosts: Hosts | None = None,
) -> PullShare:
    """Return the rows of ``edge`` that are the worker's, by the statistics of ``guide``.

    PeerError when the guide has rows that the edge has not.
    """
    if edge.rows is Rows.REPLICATED:
        row_ids = guide_rows.row_ids
    else:
        owner = assign_owners(guide, guide_rows, quadratic_from, hosts)
        row_ids = guide_rows.row_ids[owner == edge.targets.index(worker)]
    index = np.searchsorted(edge_rows.row_ids, row_ids)
    inside = index < len(edge_rows.row_ids)
    missing = row_ids[~inside]
    if inside.all():
        missing = row_ids[edge_rows.row_ids[index] != row_ids]
    if len(missing):
        raise PeerError(
            f"edge {edge.name}: {len(missing)} rows that {edge.guide!r} has are not among those of "
            f"{edge.source!r} (first row_id {missing[0]}): a node that removes rows must come "
            "before the branches part"
        )
    return PullShare.of(edge_rows, index)
