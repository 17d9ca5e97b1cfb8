"""Shares requests among servers: those with one beginning go to one server, which has read it before,
unless that one has too much to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

_BEGINNING = 256
"""Tokens at the beginning of a prompt that decide: samples of one prompt, and the turns of one
episode, have them in common."""
_MORE = 1.25
"""Times the mean of all servers that one may have under way."""


def choose_server(prompt: Sequence[int], under_way: Sequence[int]) -> int:
    """Return the index of the server for a request. ``under_way`` is the number of requests of each
    server, at least one. What is sampled does not depend on it.
    """
    beginning = np.asarray(prompt[:_BEGINNING], dtype=np.int64)
    usual = crc32(beginning.tobytes()) % len(under_way)
    mean = (sum(under_way) + 1) / len(under_way)
    if under_way[usual] + 1 <= max(_MORE * mean, 1):
        return usual
    return min(range(len(under_way)), key=lambda index: under_way[index])
