"""Series of a metric over steps, thinned to a few hundred points, without hiding what lies
between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from siirl_dask.observe import Record
from siirl_dask.planner import Phase
from siirl_dask.views.charts.headlines import SECONDS

_NO_SPREAD: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Point:
    """Values of neighbouring steps."""

    first: int
    last: int
    """First and last of the steps."""
    mean: float
    low: float
    high: float

    @property
    def step(self) -> float:
        """The middle of the steps."""
        return (self.first + self.last) / 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, as every view draws them."""

    label: str
    points: Sequence[Point]
    newest: float
    """The value of the last step, which a point of several steps does not say."""
    number: int = 0
    """Its place among the curves of a view, which decides its colour."""

    @property
    def steps(self) -> list[int]:
        """The first step of each point."""
        return [point.first for point in self.points]

    @property
    def values(self) -> list[float]:
        return [point.mean for point in self.points]

    @property
    def low(self) -> list[float]:
        return [point.low for point in self.points]

    @property
    def high(self) -> list[float]:
        return [point.high for point in self.points]

    @property
    def has_band(self) -> bool:
        """True where a point has other values than its mean."""
        return any(point.low < point.high for point in self.points)


def thin(
    series: Sequence[tuple[int, float]], most: int, spread: Mapping[int, float] = _NO_SPREAD
) -> list[Point]:
    """Return at most ``most`` points for pairs of step and value, ascending by step.

    Each point stands for as many pairs as any other, one more at most, and says their mean and
    their extremes: no value lies outside, nor one that is off by the step's ``spread``.
    """
    count = min(most, len(series))
    bounds = [0]
    if count:
        bounds = [len(series) * number // count for number in range(count + 1)]
    return [_point(series[begin:end], spread) for begin, end in pairwise(bounds)]


def _point(part: Sequence[tuple[int, float]], spread: Mapping[int, float]) -> Point:
    low = min(value - spread.get(step, 0.0) for step, value in part)
    high = max(value + spread.get(step, 0.0) for step, value in part)
    mean = sum(value / len(part) for _, value in part)  # the sum of large values may be infinite
    return Point(part[0][0], part[-1][0], min(max(mean, low), high), low, high)


def merged(points: Sequence[Point]) -> Point:
    """Return neighbouring points, one at least, as one; its mean is that of theirs."""
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    mean = sum(point.mean / len(points) for point in points)
    return Point(points[0].first, points[-1].last, min(max(mean, low), high), low, high)


def series_of(records: Sequence[Record], phase: Phase, name: str) -> list[tuple[int, float]]:
    """Return step and value of a metric where one was logged that is finite. ``SECONDS`` are
    those of the iteration.
    """
    return list(_logged(records, phase, name))


def _logged(records: Sequence[Record], phase: Phase, name: str) -> Iterator[tuple[int, float]]:
    for record in records:
        if record["phase"] == phase:
            value = record["metrics"].get(name)
            if name == SECONDS:
                value = record["seconds"]
            if value is not None and math.isfinite(value):
                yield record["step"], float(value)
