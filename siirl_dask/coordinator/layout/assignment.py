"""The small statistics that decide where rows go, and the decision.

A worker publishes one line a row: id, group, tokens, mini-batch. Whoever needs the layout of a transition gathers all
of them and computes it; the answer depends on nothing but them and on who published which, so everyone's is the same.
Rows of a worker that is a target as well stay with it where that leaves the targets balanced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.coordinator.balance import (
    NOWHERE,
    Ints,
    balance,
    balance_groups,
    balance_in_place,
    balance_minibatches,
    row_costs,
)
from siirl_dask.coordinator.frames import Frame
from siirl_dask.errors import DataError, PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import GROUP_ID, MINIBATCH, ROW_ID, TOKENS

_SOURCE = "source"
_POSITION = "position"
Lines = NDArray[np.void]
"""Statistics of rows as they travel: a line each, of ``STATISTICS``."""
STATISTICS = np.dtype(
    [(name, "<i8") for name in (ROW_ID, GROUP_ID, TOKENS)] + [(name, "<i4") for name in (MINIBATCH, _SOURCE, _POSITION)]
)
_MOST = {TOKENS: 2**48, MINIBATCH: 2**31, _POSITION: 2**48}


def describe_rows(table: pa.Table, source: int) -> Lines:
    """The statistics of ``table``, which member ``source`` of an edge publishes. DataError where a column has nulls."""
    lines = np.empty(table.num_rows, STATISTICS)
    known = [ROW_ID, GROUP_ID, TOKENS, *([MINIBATCH] if MINIBATCH in table.column_names else [])]
    lines[MINIBATCH] = 0
    for name in known:
        if table[name].null_count:
            raise DataError(f"column {name!r} has nulls: every row must have one")
        lines[name] = table[name].to_numpy()
    lines[_SOURCE] = source
    lines[_POSITION] = np.arange(table.num_rows)
    return lines


def unpack_lines(frame: Frame, sources: int) -> Lines:
    """PeerError for what are no statistics of an edge with so many sources."""
    if memoryview(frame).nbytes % STATISTICS.itemsize:
        raise PeerError(f"received {memoryview(frame).nbytes} bytes for statistics")
    lines: Lines = np.frombuffer(frame, STATISTICS)
    for name, below in (_MOST | {_SOURCE: sources}).items():
        values: NDArray[Any] = lines[name]
        if len(values) and (values.min() < 0 or values.max() >= below):
            raise PeerError(f"received statistics with {name} from {values.min()} to {values.max()}")
    return lines


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
    def of(lines: Lines) -> Statistics:
        order = np.lexsort((lines[_SOURCE], lines[ROW_ID]))
        ids = lines[ROW_ID][order]
        order = order[np.concatenate(([True], ids[1:] != ids[:-1]))] if len(ids) else order
        return Statistics(*(lines[name][order].astype(np.int64) for name in STATISTICS.names or ()))


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
