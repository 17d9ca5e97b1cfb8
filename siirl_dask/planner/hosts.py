"""Places groups of workers on hosts: ranks that speak with each other all the time lie on one host
where they can.

A group is neighbours in a role's rank order: an engine's ranks, the ranks that a model is in shards
over, or those that share a sequence. Within a host they speak through NVLink or memory, between
hosts over a link that all of them share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

Hosts = Mapping[str, str]
"""Host of each worker; a worker that it does not name is on the same host as all others that it
does not name."""
_MOST_SIZES = 4  # sizes whose orders are all tried: a configuration has three at most


def host_of(worker: str, hosts: Hosts) -> str:
    """Return a worker's host."""
    return hosts.get(worker, "")


def by_host(workers: Iterable[str], hosts: Hosts) -> dict[str, list[str]]:
    """Return the workers of each host, hosts in the order in which they come first."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        found.setdefault(host_of(worker, hosts), []).append(worker)
    return found


def groups_apart(workers: Sequence[str], hosts: Hosts, size: int) -> list[tuple[str, ...]]:
    """Return the groups of ``size`` neighbours whose workers are on several hosts."""
    apart = []
    for first in range(0, len(workers), size):
        group = tuple(workers[first : first + size])
        if len(by_host(group, hosts)) > 1:
            apart.append(group)
    return apart


def arrange(workers: Sequence[str], hosts: Hosts, sizes: Iterable[int]) -> tuple[str, ...]:
    """Return the workers in an order in which few groups of neighbours, of any of the ``sizes``,
    lie on several hosts.

    No group does if every size divides the number of each host's workers; with a single size, as
    few groups as possible do. Workers of one host keep their order, and on a single host nothing
    changes.
    """
    workers = tuple(workers)
    if len(by_host(workers, hosts)) == 1:
        return workers
    wanted = sorted({size for size in sizes if size > 1}, reverse=True)[:_MOST_SIZES]
    orders = [_in_blocks(workers, hosts, chosen) for chosen in ((), *permutations(wanted))]

    def count_apart(order: Sequence[str]) -> int:
        return sum(len(groups_apart(order, hosts, size)) for size in wanted)

    return min(orders, key=count_apart)  # the first of the best


def _in_blocks(workers: Sequence[str], hosts: Hosts, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the workers host by host: of each host as many as make up whole groups of the first
    size, then of what is left as many as make up those of the next size, at last the rest.
    """
    left = list(by_host(workers, hosts).values())
    order: list[str] = []
    for size in (*sizes, 1):
        for host in left:
            whole = len(host) // size * size
            order += host[:whole]
            del host[:whole]
    return tuple(order)
