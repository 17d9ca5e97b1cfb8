"""Balances rows over owners: pure functions of small statistics, computed alike by every worker
that needs the answer.

Rows go longest first to the least loaded, and swaps follow where that left an owner above 1.02 of
the mean. Rows that already lie with an owner stay there as far as this bound allows, so what is
balanced does not move; of those that move, as many as possible stay on their host. All is integer
arithmetic, in an order that the statistics fix: sums of floats would depend on their order, and
workers would disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from siirl_dask.planner import Edge, Hosts, host_of
from siirl_dask.tables import Ints

NOWHERE = -1
"""Home of an item that lies with none of the owners."""
# max/mean of 1.02, as integers: waiting 2% for the fullest costs less than moving rows for it
_ENOUGH = (51, 50)
# emptiest owners that the fullest tries to swap with first: as good as all of them, nearly always
_PARTNERS = 64
_PAIRS = 2**23  # pairs of items that are looked at for swaps: tens of milliseconds


@dataclass(frozen=True, slots=True)
class HostsOfRows:
    """Hosts of owners and of items (rows, or groups of them), by number, where there are
    several.
    """

    owners: Ints
    """[owners]"""
    items: Ints
    """[N]"""

    def select(self, items: Ints | NDArray[np.bool_]) -> HostsOfRows:
        """Return the hosts of some of the items."""
        return HostsOfRows(self.owners, self.items[items])

    def leaving_cost(self, costs: Ints, owner: Ints) -> int:
        """Return the cost of the items that go to an owner on another host."""
        return int(costs[self.owners[owner] != self.items].sum())


def row_costs(tokens: Ints, quadratic_from: int = 0) -> Ints:
    """Return the cost of each row, at least 1: its tokens, plus ``tokens ** 2 / quadratic_from``
    for attention.

    ``quadratic_from`` is the number of tokens at which attention costs as much as all the rest,
    about six times the hidden size of a transformer; 0 leaves attention out. [N] tokens -> [N]
    tokens, rounded down.
    """
    attention = tokens * tokens // quadratic_from if quadratic_from else 0
    return np.maximum(tokens + attention, 1)


def balance(
    costs: Sequence[int] | Ints, owners: int, loads: Sequence[int] | Ints | None = None
) -> Ints:
    """Return the owner of each item: longest first, to the least loaded, then fewest items, then
    first; then swaps.

    ``loads`` [owners] is what the owners carry already. [N] -> [N]. Longest-first beats
    Karmarkar-Karp at many owners (max/mean 1.010 against 1.097 at 1,024); with four items an owner
    it is 1.1, and swaps bring that below 1.02.
    """
    costs = np.asarray(costs, dtype=np.int64)
    carried = np.zeros(owners, np.int64)
    if loads is not None:
        carried = np.asarray(loads, dtype=np.int64)
    enough = _enough(costs, carried)
    owner = _swap(costs, _longest_first(costs, carried), carried, enough)
    fullest = int(_sums(costs, owner, carried).max())
    # too long to share with even the shortest
    alone = int((costs + costs.min(initial=enough) > enough).sum())
    if fullest <= enough or carried.any() or not 0 < alone < owners:
        return owner
    with_longest_alone = _swap(costs, _longest_first(costs, carried, alone), carried, enough)
    if _sums(costs, with_longest_alone, carried).max() < fullest:
        return with_longest_alone
    return owner


def balance_near(costs: Ints, owners: int, hosts: HostsOfRows, loads: Ints) -> Ints:
    """Return the same as ``balance``, or where fewer leave their host then, an answer whose fullest
    owner has no more.

    [N] -> [N]; ``loads`` [owners] is what the owners carry already.
    """
    spread = balance(costs, owners, loads)
    limit = max(int(_sums(costs, spread, loads).max()), _enough(costs, loads))
    near = _swap(costs, _near_first(costs, loads, hosts, limit), loads, limit)
    if _sums(costs, near, loads).max() > limit:
        return spread
    return _less_leaving(costs, spread, near, hosts)


def balance_in_place(
    costs: Ints,
    owners: int,
    homes: Ints,
    hosts: HostsOfRows | None = None,
) -> Ints:
    """Return the owner of each item, its home where possible. [N] -> [N]; a home of NOWHERE is
    none.

    The fullest owner has no more than under ``balance``, or 1.02 of the mean. With its own answer
    as homes, this returns the same answer again: rows that were balanced once do not move at the
    next edge. With ``hosts``, of two such answers the one is taken of which less leaves its host.
    """
    spread = balance(costs, owners)
    nowhere = bool((homes == NOWHERE).all())
    if nowhere and hosts is None:
        return spread
    nothing = np.zeros(owners, np.int64)
    limit = max(int(_sums(costs, spread, nothing).max()), _enough(costs, nothing))
    owner = np.where(_stays(costs, owners, homes, limit), homes, NOWHERE)
    in_place = spread if nowhere else _filled(costs, owners, owner, limit, None)
    if in_place is None:
        in_place = _rename_owners(costs, owners, homes, spread)
    if hosts is None:
        return in_place
    near = _filled(costs, owners, owner, limit, hosts)
    if near is None:
        return in_place
    return _less_leaving(costs, in_place, near, hosts)


def _less_leaving(costs: Ints, owner: Ints, near: Ints, hosts: HostsOfRows) -> Ints:
    """Return ``near`` if less leaves its host there than with ``owner``, and ``owner``
    otherwise.
    """
    if hosts.leaving_cost(costs, near) < hosts.leaving_cost(costs, owner):
        return near
    return owner


def _filled(
    costs: Ints,
    owners: int,
    owner: Ints,
    limit: int,
    hosts: HostsOfRows | None,
) -> Ints | None:
    """Return owners for those items too that have none yet; None if the fullest would have more
    than ``limit``.
    """
    owner = owner.copy()
    nothing = np.zeros(owners, np.int64)
    moving = owner == NOWHERE
    if moving.any():
        loads = _sums(costs[~moving], owner[~moving], nothing)
        if hosts is None:
            owner[moving] = balance(costs[moving], owners, loads)
        else:
            owner[moving] = _near_first(costs[moving], loads, hosts.select(moving), limit)
    owner = _swap(costs, owner, nothing, limit)
    return owner if _sums(costs, owner, nothing).max() <= limit else None


def balance_groups(
    costs: Ints,
    groups: Ints,
    owners: int,
    homes: Ints,
    hosts: HostsOfRows | None = None,
) -> Ints:
    """Return the owner of each row such that the rows of a group stay together. [N] -> [N].

    A group's home is where most of its cost lies, and so is its host.
    """
    names, group_of = np.unique(groups, return_inverse=True)
    totals = _sums(costs, group_of, np.zeros(len(names), np.int64))
    home = _costliest(costs, group_of, len(names), homes, owners)
    in_place = balance_in_place(totals, owners, home)[group_of]
    if hosts is None:
        return in_place
    host_count = int(hosts.items.max(initial=0)) + 1
    host = _costliest(costs, group_of, len(names), hosts.items, host_count)
    near = balance_in_place(totals, owners, home, HostsOfRows(hosts.owners, host))[group_of]
    return _less_leaving(costs, in_place, near, hosts)


def _costliest(costs: Ints, group_of: Ints, groups: int, place_of: Ints, places: int) -> Ints:
    """Return the place where most of each group's cost lies, [groups]; NOWHERE for a group that
    is at none.
    """
    costliest = np.full(groups, NOWHERE, dtype=np.int64)
    # the costliest place is last: it overwrites
    for pair in _pairs_by_cost(costs, group_of, places, place_of)[::-1]:
        costliest[pair // places] = pair % places
    return costliest


def balance_minibatches(
    costs: Ints,
    minibatches: Ints,
    owners: int,
    homes: Ints,
    hosts: HostsOfRows | None = None,
) -> Ints:
    """Return the owner of each row, each mini-batch balanced by itself: workers wait for each other
    after every one.

    [N] -> [N].
    """
    owner = np.empty(len(costs), dtype=np.int64)
    for minibatch in np.unique(minibatches):
        rows = np.flatnonzero(minibatches == minibatch)
        hosts_of_rows = None if hosts is None else hosts.select(rows)
        owner[rows] = balance_in_place(costs[rows], owners, homes[rows], hosts_of_rows)
    return owner


def _sums(costs: Ints, owner: Ints, carried: Ints) -> Ints:
    """Return what each owner carries with these items on top. Not by bincount, which adds
    floats.
    """
    sums = carried.copy()
    np.add.at(sums, owner, costs)
    return sums


def _enough(costs: Ints, carried: Ints) -> int:
    """Return a load that nobody needs to be below: 1.02 of the mean, or the longest item."""
    numerator, denominator = _ENOUGH
    total = int(costs.sum() + carried.sum())
    mean_times = numerator * total // (denominator * len(carried))
    return max(mean_times, int(costs.max(initial=0)))


def _longest_first(costs: Ints, carried: Ints, alone: int = 0) -> Ints:
    """Return the owner of each item; the ``alone`` longest have the first owners for themselves."""
    owners = len(carried)
    # load, count and owner as one number: twice as fast as a heap of tuples
    unit = (len(costs) + 1) * owners
    loads = carried.tolist()
    heap = [loads[owner] * unit + owner for owner in range(alone, owners)]
    heapify(heap)
    order = np.argsort(-costs, kind="stable")
    chosen = list(range(alone))
    for cost in costs[order[alone:]].tolist():
        least = heap[0]
        chosen.append(least % owners)
        heapreplace(heap, least + cost * unit + owners)
    owner = np.empty(len(costs), dtype=np.int64)
    owner[order] = chosen
    return owner


def _near_first(costs: Ints, carried: Ints, hosts: HostsOfRows, limit: int) -> Ints:
    """Return the owner of each item: longest first, to the least loaded on its host, if that has no
    more than ``limit`` then; the rest to the least loaded of all.
    """
    owners = len(carried)
    loads = carried.copy()
    unit = (len(costs) + 1) * owners  # as in ``_longest_first``
    heaps: dict[int, list[int]] = {}
    hosts_of_owners = hosts.owners.tolist()
    for owner, load in enumerate(carried.tolist()):
        heaps.setdefault(hosts_of_owners[owner], []).append(load * unit + owner)
    for heap in heaps.values():
        heapify(heap)
    order = np.argsort(-costs, kind="stable")
    chosen = np.full(len(costs), NOWHERE, dtype=np.int64)
    items = order.tolist()
    item_costs = costs[order].tolist()
    item_hosts = hosts.items[order].tolist()
    for item, cost, host in zip(items, item_costs, item_hosts, strict=True):
        heap = heaps.get(host, [])
        if heap and heap[0] // unit + cost <= limit:
            least = heap[0] % owners
            chosen[item] = least
            loads[least] += cost
            heapreplace(heap, heap[0] + cost * unit + owners)
    rest = chosen == NOWHERE
    chosen[rest] = balance(costs[rest], owners, loads)
    return chosen


def _swap(costs: Ints, owner: Ints, carried: Ints, enough: int) -> Ints:
    """Swap items of the fullest owner with shorter ones of others, until that no longer helps or
    nobody has more than ``enough``.
    """
    owner = owner.copy()
    owners = len(carried)
    loads = _sums(costs, owner, carried)
    partners = _PARTNERS
    pairs = _PAIRS
    while loads.max() > enough and partners and pairs > 0:
        full = int(loads.argmax())
        tried = np.zeros(owners, dtype=np.bool_)
        tried[np.argsort(loads, kind="stable")[:partners]] = True
        own = np.flatnonzero(owner == full)
        others = np.flatnonzero(tried[owner])
        pairs -= len(own) * len(others)
        gain = costs[own][:, None] - costs[others]
        # the larger of the two loads afterwards
        fuller = np.maximum(loads[full] - gain, loads[owner[others]] + gain)
        # no swap helps: try with all owners, then give up
        if fuller.min(initial=loads[full]) == loads[full]:
            partners = owners if partners < owners else 0
            continue
        own_at, others_at = divmod(int(fuller.argmin()), len(others))
        item = own[own_at]
        other_item = others[others_at]
        other = owner[other_item]
        loads[full] -= gain[own_at, others_at]
        loads[other] += gain[own_at, others_at]
        owner[item] = other
        owner[other_item] = full
        partners = _PARTNERS
    return owner


def _stays(costs: Ints, owners: int, homes: Ints, limit: int) -> NDArray[np.bool_]:
    """Return which items stay at home: all of an owner that has no more than ``limit``; of a fuller
    one, longest first, each that still fits into the mean, at least one.
    """
    at_home = homes != NOWHERE
    loads_at_home = _sums(costs[at_home], homes[at_home], np.zeros(owners, np.int64))
    mean = int(costs.sum()) // owners
    bounds = np.where(loads_at_home <= limit, limit, mean).tolist()
    loads = [0] * owners
    stays = np.zeros(len(costs), dtype=np.bool_)
    order = np.argsort(-costs, kind="stable")
    order = order[at_home[order]]
    items = order.tolist()
    item_costs = costs[order].tolist()
    item_homes = homes[order].tolist()
    for item, cost, home in zip(items, item_costs, item_homes, strict=True):
        if loads[home] == 0 or loads[home] + cost <= bounds[home]:
            loads[home] += cost
            stays[item] = True
    return stays


def _rename_owners(costs: Ints, owners: int, homes: Ints, owner: Ints) -> Ints:
    """Keep the division of the items, and give each part to the owner that has most of it
    already and is still free.
    """
    owner_of_part = [NOWHERE] * owners
    free = set(range(owners))
    for pair in _pairs_by_cost(costs, owner, owners, homes).tolist():
        part, home = divmod(pair, owners)
        if owner_of_part[part] == NOWHERE and home in free:
            owner_of_part[part] = home
            free.remove(home)
    for part, own in enumerate(owner_of_part):
        if own == NOWHERE:
            owner_of_part[part] = min(free)
            free.remove(owner_of_part[part])
    return np.array(owner_of_part, dtype=np.int64)[owner]


def _pairs_by_cost(costs: Ints, part_of: Ints, owners: int, homes: Ints) -> Ints:
    """Return ``part * owners + home`` for each part and each home of its items, those with most
    cost there first.
    """
    at_home = homes != NOWHERE
    pair_of_item = part_of[at_home] * owners + homes[at_home]
    pairs, pair_of = np.unique(pair_of_item, return_inverse=True)
    totals = _sums(costs[at_home], pair_of, np.zeros(len(pairs), np.int64))
    return pairs[np.argsort(-totals, kind="stable")]


# Preferences: a target for each row, known before its length is.
#
# Balancing needs the lengths of all rows, so no row has an owner before the last one is made. Rows
# that lie with none of the targets therefore prefer one, by their source and group alone, and
# balancing moves away from there only what it must: of many rows 85 to 100 % of the tokens stay. A
# row that is finished early can travel there meanwhile.


_BITS = 32
# 2^32 over the golden ratio: multiples of it, modulo 2^32, spread evenly however many there are
_SPREAD = 0x9E3779B1


def preferred_targets(groups: Ints, sources: Ints, edge: Edge) -> Ints:
    """Return the index of the target that each row prefers. [rows] group ids, [rows] indices of
    sources -> [rows].

    Sources share the targets evenly among them in order, and each its groups evenly among its
    targets. So few pairs of workers exchange rows early, as many as there are workers, and a group
    is whole.
    """
    spread = groups.astype(np.uint64) * np.uint64(_SPREAD)
    spread &= np.uint64(2**_BITS - 1)
    places = (sources.astype(np.uint64) << np.uint64(_BITS)) + spread
    end = np.uint64(len(edge.sources) << _BITS)  # of all places
    targets = places * np.uint64(len(edge.targets)) // end
    return targets.astype(np.int64)


def prefers(edge: Edge, hosts: Hosts) -> bool:
    """Return whether rows of the edge prefer a target.

    They do not where some targets are on a host with sources and others are not: there rows stay on
    their host.
    """
    if edge.early is None:
        return False
    targets = {host_of(worker, hosts) for worker in edge.targets}
    if len(targets) == 1:
        return True
    return targets.isdisjoint(host_of(worker, hosts) for worker in edge.sources)


def early_targets(
    edge: Edge,
    source: str,
    hosts: Hosts,
    *,
    prefetch: bool | None,
) -> dict[int, str]:
    """Return the targets, by index, that may get rows of a source early. ``prefetch``: see
    ``data.prefetch``.
    """
    if prefetch is False or source not in edge.sources or not prefers(edge, hosts):
        return {}
    at = edge.sources.index(source)
    here = host_of(source, hosts)
    first = at * len(edge.targets) // len(edge.sources)
    stop = -(-(at + 1) * len(edge.targets) // len(edge.sources))  # rounded up
    targets = {}
    for index in range(first, stop):
        target = edge.targets[index]
        if prefetch or host_of(target, hosts) != here:
            targets[index] = target
    return targets
