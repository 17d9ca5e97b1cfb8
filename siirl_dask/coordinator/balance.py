"""Who owns which row: pure functions of small statistics, computed alike by every worker that needs the answer."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def balance(sizes: Sequence[int] | Ints, owners: int, loads: Sequence[int] | None = None) -> Ints:
    """Owner of each item: longest first, to whoever has least, then fewest, then comes first.

    ``loads`` is what the owners carry already. Same sizes, same answer, on every worker. Longest-first beats
    Karmarkar-Karp at many owners (max/mean 1.010 against 1.097 at 1,024).
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    heap = [(load, 0, owner) for owner, load in enumerate(loads or [0] * owners)]
    heapify(heap)
    result = np.empty(len(sizes), dtype=np.int64)
    for item in np.argsort(-sizes, kind="stable").tolist():
        load, count, owner = heappop(heap)
        result[item] = owner
        heappush(heap, (load + int(sizes[item]), count + 1, owner))
    return result


def balance_groups(sizes: Ints, groups: Ints, owners: int) -> Ints:
    """Owner of each row such that the rows of a group stay together: groups are balanced by the sum of their sizes."""
    _, group_of = np.unique(groups, return_inverse=True)
    totals = np.bincount(group_of, weights=sizes).astype(np.int64)
    return balance(totals, owners)[group_of]


def balance_minibatches(sizes: Ints, minibatches: Ints, owners: int) -> Ints:
    """Owner of each row, each mini-batch balanced on its own: workers wait for each other after every one of them."""
    result = np.empty(len(sizes), dtype=np.int64)
    for minibatch in np.unique(minibatches):
        rows = np.flatnonzero(minibatches == minibatch)
        result[rows] = balance(sizes[rows], owners)
    return result


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """``[start, stop)`` of each of ``parts`` consecutive runs of ``count`` items, the longer ones first: 10 over 4 is
    (0,3) (3,6) (6,8) (8,10).
    """
    base, extra = divmod(count, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(starts))
