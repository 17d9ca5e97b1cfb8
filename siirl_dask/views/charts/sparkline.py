"""Draws a curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.views.charts.series import thin

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(series: Sequence[tuple[int, float]], width: int) -> str:
    """Return at most ``width`` blocks for pairs of step and value: the lowest mean is the lowest
    block.

    A curve that never changes is in the middle.
    """
    means = [point.mean for point in thin(series, width)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    if low == high:
        return _BLOCKS[3] * len(means)
    scale = high / 2 - low / 2  # halves: the difference of large values may be infinite
    return "".join(_BLOCKS[min(7, int((mean / 2 - low / 2) / scale * 8))] for mean in means)
