"""Whole numbers of rows, and ranges of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` of ``parts`` consecutive ranges of ``count`` items, the longer ones
    first.

    10 over 4 is (0,3) (3,6) (6,8) (8,10).
    """
    base, extra = divmod(count, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(starts))
