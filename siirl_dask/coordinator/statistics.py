"""The small statistics that decide where rows go, and the decision.

A worker publishes one line a row: id, group, tokens, mini-batch. Whoever needs the layout of a transition gathers all
of them and computes it; the answer depends on nothing but them and on who published which, so everyone's is the same.
Rows of a worker that is a target as well stay with it where that leaves the targets balanced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.balance import (
    NOWHERE,
    Ints,
    balance,
    balance_groups,
    balance_in_place,
    balance_minibatches,
    row_costs,
)
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import GROUP_ID, MINIBATCH, ROW_ID, TOKENS

_SOURCE = "source"
_POSITION = "position"
STATISTICS = pa.schema(
    [(name, pa.int64()) for name in (ROW_ID, GROUP_ID, TOKENS)]
    + [(name, pa.int32()) for name in (MINIBATCH, _SOURCE, _POSITION)]
)


def describe_rows(table: pa.Table, source: int) -> pa.Table:
    """The statistics of ``table``, which member ``source`` of an edge publishes."""
    rows = table.num_rows
    minibatch = table[MINIBATCH].cast(pa.int32()) if MINIBATCH in table.column_names else np.zeros(rows, "i4")
    columns = [table[ROW_ID], table[GROUP_ID], table[TOKENS], minibatch]
    return pa.table([*columns, np.full(rows, source, "i4"), np.arange(rows, dtype="i4")], schema=STATISTICS)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of all rows of an edge, sorted by row id; a row that several sources hold is listed once, where it is found
    first.
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
    def of(table: pa.Table) -> Statistics:
        arrays = {name: table[name].to_numpy().astype(np.int64) for name in STATISTICS.names}
        order = np.lexsort((arrays[_SOURCE], arrays[ROW_ID]))
        ids = arrays[ROW_ID][order]
        order = order[np.concatenate(([True], ids[1:] != ids[:-1]))] if len(ids) else order
        return Statistics(*(arrays[name][order] for name in STATISTICS.names))


def assign(edge: Edge, rows: Statistics, quadratic_from: int = 0) -> Ints:
    """For each row of the guiding statistics, the index of its owner among the edge's targets. Not for REPLICATED.

    ``quadratic_from``: see ``row_costs``.
    """
    owners = len(edge.targets)
    costs, homes = row_costs(rows.tokens, quadratic_from), _homes(edge, rows)
    match edge.rows:
        case Rows.GROUPED:
            return balance_groups(costs, rows.groups, owners, homes)
        case Rows.BALANCED if edge.by_minibatch:
            return balance_minibatches(costs, rows.minibatches, owners, homes)
        case Rows.BALANCED:
            return balance_in_place(costs, owners, homes)
        case Rows.ANYWHERE:
            return _stay_or_spread(costs, owners, homes)
    raise AssertionError(f"{edge.rows} rows have no single owner")


def _homes(edge: Edge, rows: Statistics) -> Ints:
    """For each row, the index among the targets of the worker that published it; NOWHERE if that is no target."""
    place = {worker: index for index, worker in enumerate(edge.targets)}
    of_source = np.array([place.get(worker, NOWHERE) for worker in edge.sources], dtype=np.int64)
    return of_source[rows.sources]


def _stay_or_spread(costs: Ints, owners: int, homes: Ints) -> Ints:
    """Rows of a worker that is a target as well stay there; the others go to whoever has least."""
    owner, away = homes.copy(), homes == NOWHERE
    loads = np.zeros(owners, dtype=np.int64)
    np.add.at(loads, homes[~away], costs[~away])
    owner[away] = balance(costs[away], owners, loads)
    return owner


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker pulls of an edge: positions of rows in what each source published."""

    row_ids: Ints
    """Ascending."""
    by_source: dict[int, Ints]
    places: dict[int, Ints]
    """Of the same rows, by source: index into ``row_ids``."""
    identity: pa.Table
    """The columns that the statistics tell of the rows, in order: these need not travel."""


def share_of(
    edge: Edge, worker: str, guide: Edge, guide_rows: Statistics, edge_rows: Statistics, quadratic_from: int = 0
) -> Share:
    """The rows of ``edge`` that belong to ``worker``. PeerError if the guide knows rows that the edge has not."""
    if edge.rows is Rows.REPLICATED:
        mine = guide_rows.row_ids
    else:
        mine = guide_rows.row_ids[assign(guide, guide_rows, quadratic_from) == edge.targets.index(worker)]
    found = np.searchsorted(edge_rows.row_ids, mine)
    inside = found < len(edge_rows.row_ids)
    if not inside.all() or not np.array_equal(edge_rows.row_ids[found], mine):
        missing = mine[~inside] if not inside.all() else mine[edge_rows.row_ids[found] != mine]
        raise PeerError(
            f"edge {edge.name}: {len(missing)} rows that {edge.guide!r} has are not among those of {edge.source!r} "
            f"(first row_id {missing[0]}): a node that removes rows must come before the branches part"
        )
    sources = edge_rows.sources[found]
    places = {int(source): np.flatnonzero(sources == source) for source in np.unique(sources)}
    positions = {source: edge_rows.positions[found[rows]] for source, rows in places.items()}
    identity = pa.table({ROW_ID: mine, GROUP_ID: edge_rows.groups[found], TOKENS: edge_rows.tokens[found]})
    return Share(mine, positions, places, identity)
