"""Routes of replicated rows between hosts: a host takes a source's rows over the link once, and
passes them on inside.

All targets of an edge get all of its rows. On a host with several targets each of them takes the
rows of some of the sources on other hosts, and the others take these from it. Rows of a source on
the host itself need no such relay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from siirl_dask.planner import Edge, Hosts, Rows, by_host, host_of


@dataclass(frozen=True, slots=True)
class HostRoutes:
    """The ways of an edge's rows to the targets on one host."""

    targets: tuple[str, ...]
    """Targets on the host."""
    relays: Mapping[int, int]
    """Index of the target that takes a source's rows over the link and passes them on, by the
    source's index; sources without one send their rows to each target.
    """


def routes_to(worker: str, edge: Edge, hosts: Hosts) -> HostRoutes:
    """Return the ways of an edge's rows to the host of one of its targets."""
    here = host_of(worker, hosts)
    targets = tuple(by_host(edge.targets, hosts)[here])
    if edge.rows is not Rows.REPLICATED or len(targets) == 1:
        return HostRoutes(targets, {})
    away = [index for index, source in enumerate(edge.sources) if host_of(source, hosts) != here]
    relays = {source: number % len(targets) for number, source in enumerate(away)}
    return HostRoutes(targets, relays)


def count_takers(source: str, edge: Edge, hosts: Hosts) -> int:
    """Return how often each row of a source is acked.

    Once where a row has one owner. By group, once for every target, by itself or by another one on
    its behalf. If rows are replicated, by every target on the source's host, and by one on each
    other host.
    """
    if edge.rows is not Rows.REPLICATED:
        return len(edge.targets) if edge.by_group else 1
    here = host_of(source, hosts)
    takers = 0
    for host, targets in by_host(edge.targets, hosts).items():
        takers += len(targets) if host == here else 1
    return takers


def near_sources(worker: str, edge: Edge, hosts: Hosts) -> NDArray[np.bool_]:
    """Return which of an edge's sources are on a worker's host, [sources]; a row that several
    have is taken there.
    """
    here = host_of(worker, hosts)
    return np.array([host_of(source, hosts) == here for source in edge.sources], dtype=np.bool_)
