"""Measures how fast a core of this machine is right now: neighbours and clocks make one of a
cloud's differ by half within minutes, which the kernel's count of core seconds does not show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import mean

import numpy as np
from numpy.typing import NDArray

_READ, _PRODUCT, _LOOP = 4096, 384, 60_000
_SECONDS = (3.6e-3, 1.6e-3, 2.7e-3)
"""Seconds of a quiet core for the reading of a matrix, a product of two, and a loop of Python."""


def pace() -> float:
    """Return how long a core takes for work that never changes, as a multiple of what a quiet one
    took.

    It takes some 40 ms. Numpy must be limited to one thread.
    """
    return mean(
        _core_seconds(work) / quiet
        for work, quiet in zip((_read, _multiply, _loop), _SECONDS, strict=True)
    )


def _core_seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


@cache
def _matrix(size: int) -> NDArray[np.float32]:
    return np.ones((size, size), np.float32)


def _read() -> object:
    return _matrix(_READ) @ _matrix(_READ)[0]


def _multiply() -> object:
    return _matrix(_PRODUCT) @ _matrix(_PRODUCT)


def _loop() -> object:
    total = 0
    for number in range(_LOOP):
        total += number & 7
    return total
