"""Finds a threshold over the tokens of all workers from counts and sums, without gathering the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_LARGEST_BITS = int(np.array(np.finfo(np.float32).max).view(np.int32))


def largest_float32(holds: Callable[[float], bool]) -> float | None:
    """Return the largest finite float32 of at least 0 for which ``holds`` returns True; None if it
    is False for 0.

    Where it is True it must be so for all smaller numbers too. This is a bisection over the bits of
    non-negative floats, which have the order of the floats: at most 32 calls. Every worker must
    make the same number of calls, which it does if all get the same answers.
    """
    if not holds(0.0):
        return None
    low = 0
    high = _LARGEST_BITS
    while low < high:
        middle = (low + high + 1) // 2
        if holds(_from_bits(middle)):
            low = middle
        else:
            high = middle - 1
    return _from_bits(low)


def _from_bits(bits: int) -> float:
    return float(np.array(bits, np.int32).view(np.float32))
