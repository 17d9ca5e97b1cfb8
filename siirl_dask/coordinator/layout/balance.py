"""Who owns which row: pure functions of small statistics, computed alike by every worker that needs the answer.

Longest first to whoever has least, then swaps where that left somebody more than 1.02 of the mean. Rows that lie with
an owner already stay there as far as that bound allows, so what is balanced does not move. All is integer arithmetic,
in an order that the statistics fix: the same answer on every worker, to the last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NOWHERE = -1
"""Home of an item that lies with none of the owners."""
_ENOUGH = (51, 50)  # max/mean of 1.02, as integers: waiting 2% for the fullest costs less than moving rows for it
_PARTNERS = 64  # emptiest owners that the fullest tries to swap with first: as good as all of them, nearly always
_PAIRS = 2**23  # of items that are looked at for swaps: tens of milliseconds


def row_costs(tokens: Ints, quadratic_from: int = 0) -> Ints:
    """What each row costs, at least 1: its tokens, and ``tokens ** 2 / quadratic_from`` on top for attention.

    ``quadratic_from`` is the number of tokens at which attention costs as much as all the rest, about six times the
    hidden size of a transformer; 0 leaves attention out. [N] tokens -> [N] tokens, rounded down.
    """
    attention = tokens * tokens // quadratic_from if quadratic_from else 0
    return np.maximum(tokens + attention, 1)


def balance(costs: Sequence[int] | Ints, owners: int, loads: Sequence[int] | Ints | None = None) -> Ints:
    """Owner of each item: longest first, to whoever has least, then fewest, then comes first; then swaps.

    ``loads`` is what the owners carry already. Longest-first beats Karmarkar-Karp at many owners (max/mean 1.010
    against 1.097 at 1,024); with four items an owner it is 1.1, and swaps bring that below 1.02.
    """
    costs = np.asarray(costs, dtype=np.int64)
    carried = np.zeros(owners, np.int64) if loads is None else np.asarray(loads, dtype=np.int64)
    enough = _enough(costs, carried)
    plain = _swapped(costs, _longest_first(costs, carried), carried, enough)
    fullest = int(_sums(costs, plain, carried).max())
    alone = int((costs + costs.min(initial=enough) > enough).sum())  # too long to share with even the shortest
    if fullest <= enough or carried.any() or not 0 < alone < owners:
        return plain
    apart = _swapped(costs, _longest_first(costs, carried, alone), carried, enough)
    return apart if _sums(costs, apart, carried).max() < fullest else plain


def balance_in_place(costs: Ints, owners: int, homes: Ints) -> Ints:
    """Owner of each item, where possible its home (NOWHERE: it has none), with the fullest owner no fuller than
    ``balance`` would have it, or than 1.02 of the mean. Given its own answer as homes, it gives the same again.
    """
    plain, nothing = balance(costs, owners), np.zeros(owners, np.int64)
    if (homes == NOWHERE).all():
        return plain
    most = max(int(_sums(costs, plain, nothing).max()), _enough(costs, nothing))
    result = np.where(_staying(costs, owners, homes, most), homes, NOWHERE)
    left = result == NOWHERE
    if left.any():
        result[left] = balance(costs[left], owners, _sums(costs[~left], result[~left], nothing))
    result = _swapped(costs, result, nothing, most)
    return result if _sums(costs, result, nothing).max() <= most else _renamed(costs, owners, homes, plain)


def balance_groups(costs: Ints, groups: Ints, owners: int, homes: Ints) -> Ints:
    """Owner of each row such that the rows of a group stay together. A group is at home where most of its cost lies."""
    names, group_of = np.unique(groups, return_inverse=True)
    totals = _sums(costs, group_of, np.zeros(len(names), np.int64))
    home = np.full(len(names), NOWHERE, dtype=np.int64)
    for pair in _pairs_by_cost(costs, group_of, owners, homes)[::-1]:  # that with most overwrites the others
        home[pair // owners] = pair % owners
    return balance_in_place(totals, owners, home)[group_of]


def balance_minibatches(costs: Ints, minibatches: Ints, owners: int, homes: Ints) -> Ints:
    """Owner of each row, each mini-batch balanced on its own: workers wait for each other after every one of them."""
    result = np.empty(len(costs), dtype=np.int64)
    for minibatch in np.unique(minibatches):
        rows = np.flatnonzero(minibatches == minibatch)
        result[rows] = balance_in_place(costs[rows], owners, homes[rows])
    return result


def _sums(costs: Ints, owner: Ints, carried: Ints) -> Ints:
    """What each owner carries with these items on top. Not bincount, which adds floats."""
    sums = carried.copy()
    np.add.at(sums, owner, costs)
    return sums


def _enough(costs: Ints, carried: Ints) -> int:
    """A load that nobody needs to be below: 1.02 of the mean, or the longest item."""
    of, per = _ENOUGH
    return max(of * int(costs.sum() + carried.sum()) // (per * len(carried)), int(costs.max(initial=0)))


def _longest_first(costs: Ints, carried: Ints, alone: int = 0) -> Ints:
    """Owner of each item; the ``alone`` longest have the first owners for themselves."""
    owners = len(carried)
    unit = (len(costs) + 1) * owners  # load, count and owner as one number: twice as fast as a heap of tuples
    heap = [load * unit + owner for owner, load in enumerate(carried.tolist())][alone:]
    heapify(heap)
    order = np.argsort(-costs, kind="stable")
    chosen = list(range(alone))
    for cost in costs[order[alone:]].tolist():
        least = heap[0]
        chosen.append(least % owners)
        heapreplace(heap, least + cost * unit + owners)
    result = np.empty(len(costs), dtype=np.int64)
    result[order] = chosen
    return result


def _swapped(costs: Ints, owner: Ints, carried: Ints, enough: int) -> Ints:
    """Items of the fullest owner change places with shorter ones of others, until that no longer helps or nobody has
    more than ``enough``.
    """
    owner, owners, loads = owner.copy(), len(carried), _sums(costs, owner, carried)
    partners, pairs = _PARTNERS, _PAIRS
    while loads.max() > enough and partners and pairs > 0:
        full = int(loads.argmax())
        tried = np.zeros(owners, dtype=np.bool_)
        tried[np.argsort(loads, kind="stable")[:partners]] = True
        mine, theirs = np.flatnonzero(owner == full), np.flatnonzero(tried[owner])
        pairs -= len(mine) * len(theirs)
        gain = costs[mine][:, None] - costs[theirs]
        fuller = np.maximum(loads[full] - gain, loads[owner[theirs]] + gain)
        if fuller.min(initial=loads[full]) == loads[full]:
            partners = owners if partners < owners else 0
            continue
        mine_at, theirs_at = divmod(int(fuller.argmin()), len(theirs))
        give, take, other = mine[mine_at], theirs[theirs_at], owner[theirs[theirs_at]]
        loads[[full, other]] += np.array([-1, 1]) * gain[mine_at, theirs_at]
        owner[give], owner[take] = other, full
        partners = _PARTNERS
    return owner


def _staying(costs: Ints, owners: int, homes: Ints, most: int) -> NDArray[np.bool_]:
    """Which items stay at home: all of an owner that has no more than ``most``, else what fits the mean, longest
    first; at least the longest.
    """
    at_home = homes != NOWHERE
    lying = _sums(costs[at_home], homes[at_home], np.zeros(owners, np.int64))
    room = np.where(lying <= most, most, int(costs.sum()) // owners).tolist()
    loads = [0] * owners
    stays = np.zeros(len(costs), dtype=np.bool_)
    order = np.argsort(-costs, kind="stable")
    order = order[at_home[order]]
    for item, cost, home in zip(order.tolist(), costs[order].tolist(), homes[order].tolist(), strict=True):
        if loads[home] == 0 or loads[home] + cost <= room[home]:
            loads[home] += cost
            stays[item] = True
    return stays


def _renamed(costs: Ints, owners: int, homes: Ints, owner: Ints) -> Ints:
    """The same parts of the items, each given to the owner that has most of it already, as far as they are free."""
    name = [NOWHERE] * owners
    free = set(range(owners))
    for pair in _pairs_by_cost(costs, owner, owners, homes).tolist():
        part, home = divmod(pair, owners)
        if name[part] == NOWHERE and home in free:
            name[part] = home
            free.remove(home)
    rest = iter(sorted(free))
    return np.array([next(rest) if home == NOWHERE else home for home in name], dtype=np.int64)[owner]


def _pairs_by_cost(costs: Ints, part_of: Ints, owners: int, homes: Ints) -> Ints:
    """``part * owners + home`` of all parts that lie somewhere, those with most cost there first."""
    lies = homes != NOWHERE
    pairs, pair_of = np.unique(part_of[lies] * owners + homes[lies], return_inverse=True)
    there = _sums(costs[lies], pair_of, np.zeros(len(pairs), np.int64))
    return pairs[np.argsort(-there, kind="stable")]


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """``[start, stop)`` of each of ``parts`` consecutive runs of ``count`` items, the longer ones first: 10 over 4 is
    (0,3) (3,6) (6,8) (8,10).
    """
    base, extra = divmod(count, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(starts))
