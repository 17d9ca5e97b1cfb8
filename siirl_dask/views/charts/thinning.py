"""Thins curves of any number of steps to a few hundred points, without hiding what lies between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from siirl_dask.observe.metrics import Record
from siirl_dask.planner import Phase
from siirl_dask.views.charts.headlines import SECONDS


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


def thin(series: Sequence[tuple[int, float]], most: int) -> list[Point]:
    """Return at most ``most`` points for pairs of step and value, ascending by step.

    Each point stands for as many pairs as any other, one more at most, and says their mean and their extremes: no value
    lies outside.
    """
    count = min(most, len(series))
    bounds = [len(series) * number // count for number in range(count + 1)] if count else [0]
    return [_point(series[begin:end]) for begin, end in pairwise(bounds)]


def _point(part: Sequence[tuple[int, float]]) -> Point:
    values = [value for _, value in part]
    low = min(values)
    high = max(values)
    mean = sum(value / len(values) for value in values)  # the sum of large values may be infinite
    return Point(part[0][0], part[-1][0], min(max(mean, low), high), low, high)


def merged(points: Sequence[Point]) -> Point:
    """Return neighbouring points, one at least, as one; its mean is that of theirs."""
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    mean = sum(point.mean / len(points) for point in points)
    return Point(points[0].first, points[-1].last, min(max(mean, low), high), low, high)


def series_of(records: Sequence[Record], phase: Phase, name: str) -> list[tuple[int, float]]:
    """Return step and value of a metric where it was logged. ``SECONDS`` are those of the iteration."""
    return list(_logged(records, phase, name))


def _logged(records: Sequence[Record], phase: Phase, name: str) -> Iterator[tuple[int, float]]:
    for record in records:
        if record["phase"] == phase:
            value = record["seconds"] if name == SECONDS else record["metrics"].get(name)
            if value is not None:
                yield record["step"], float(value)
