"""Finds a threshold over the tokens of all workers, by asking them for counts and sums alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_LARGEST = int(np.array(np.finfo(np.float32).max).view(np.int32))


def largest_float32(holds: Callable[[float], bool]) -> float | None:
    """Return the largest finite float32 of at least 0 for which ``holds``; None if it does not even for 0.

    Where it holds it must hold for all smaller numbers too. Halving the 2^31 numbers asks at most 32 times: their order
    is that of their bits. Every worker must ask as often, which it does if all get the same answers.
    """
    if not holds(0.0):
        return None
    low = 0
    high = _LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        if holds(_number(middle)):
            low = middle
        else:
            high = middle - 1
    return _number(low)


def _number(bits: int) -> float:
    return float(np.array(bits, np.int32).view(np.float32))
