"""Draws a line chart as SVG, without a script: colours are the page's, and what a point says is its tooltip."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from siirl_dask.views.charts.figures import number
from siirl_dask.views.charts.thinning import Point, merged, thin
from siirl_dask.views.report.text import safe

_WIDTH = 360
_HEIGHT = 190
_LEFT = 46
_RIGHT = 8
_TOP = 8
_BOTTOM = 22
_MOST = 240  # points of a curve
_TOOLTIPS = 80  # of a chart
_DOTS = 16  # points up to which each is marked
_COLOURS = 8
_LEAST = 1e-300  # difference that is drawn


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's values of one metric."""

    run: int
    """Index of the run, which decides the colour."""
    label: str
    series: Sequence[tuple[int, float]]
    """Steps and values, ascending."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps steps and values to the drawing."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        inner = _HEIGHT - _TOP - _BOTTOM
        return _TOP + inner - (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2) * inner  # halves are finite


def chart(title: str, curves: Sequence[Curve], *, tooltips: bool = True) -> str:
    """Return a figure with all curves that have values; an empty text where none has."""
    drawn = [(curve, thin(curve.series, _MOST)) for curve in curves if curve.series]
    if not drawn:
        return ""
    scale = _scale([point for _, points in drawn for point in points])
    parts = [*_grid(scale)]
    for curve, points in drawn:
        parts += _curve(curve, points, scale)
    if tooltips:
        parts += _tooltips([(curve.label, points) for curve, points in drawn], scale)
    last = " ".join(f'<b class="r{curve.run % _COLOURS}">{number(curve.series[-1][1])}</b>' for curve, _ in drawn)
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{safe(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption><span>{safe(title)}</span><span>{last}</span></figcaption>{svg}</figure>"


def _scale(points: Sequence[Point]) -> _Scale:
    first = min(point.first for point in points)
    last = max(point.last for point in points)
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    if high / 2 - low / 2 < _LEAST:
        apart = max(abs(low) / 10, _LEAST) if low else 1.0
        low = low - apart
        high = high + apart
    else:
        margin = (high - low) / 20 if math.isfinite(high - low) else 0.0
        low = low - margin * (low < 0 or low > margin)
        high = high + margin
    return _Scale(first - (first == last) / 2, last + (first == last) / 2, low, high)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` to ``high``, evenly apart; ``low`` is below ``high``."""
    rough = (high - low) / most
    if not math.isfinite(rough) or rough <= 0:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), 10 * power)
    if apart == 0 or low + apart == low:
        return [low, high]
    first = math.ceil(low / apart)
    found = [count * apart for count in range(first, first + most + 1)]
    return [value for value in found if value <= high][:most]


def _grid(scale: _Scale) -> Iterator[str]:
    for value in ticks(scale.low, scale.high, 5):
        y = scale.y(value)
        yield f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>'
    for step in ticks(scale.first, scale.last, 6):
        if step == int(step):
            yield f'<text x="{scale.x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{int(step):,}</text>'


def _curve(curve: Curve, points: Sequence[Point], scale: _Scale) -> Iterator[str]:
    colour = f"r{curve.run % _COLOURS}" + (" dash" if curve.run >= _COLOURS else "")
    if len(points) < len(curve.series):
        above = [f"{scale.x(point.step):.1f},{scale.y(point.high):.1f}" for point in points]
        below = [f"{scale.x(point.step):.1f},{scale.y(point.low):.1f}" for point in reversed(points)]
        yield f'<polygon class="band {colour}" points="{" ".join([*above, *below])}"/>'
    line = " ".join(f"{scale.x(point.step):.1f},{scale.y(point.mean):.1f}" for point in points)
    yield f'<polyline class="{colour}" points="{line}"/>'
    if len(points) <= _DOTS:
        for point in points:
            yield f'<circle class="{colour}" cx="{scale.x(point.step):.1f}" cy="{scale.y(point.mean):.1f}" r="2.5"/>'


def _tooltips(curves: Sequence[tuple[str, Sequence[Point]]], scale: _Scale) -> Iterator[str]:
    """Yield invisible columns over the chart, each of which tells every curve's values there."""
    longest = max((points for _, points in curves), key=len)
    every = -(-len(longest) // _TOOLTIPS)
    columns = [merged(longest[at : at + every]) for at in range(0, len(longest), every)]
    places = [scale.x(column.step) for column in columns]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(places)), _WIDTH - _RIGHT]
    for at, column in enumerate(columns):
        told = f"step {column.first:,}" + (f" to {column.last:,}" if column.last > column.first else "")
        for label, points in curves:
            here = _within(points, column)
            told += f"\n{number(here.mean)}  {label}"
            if here.low < here.high:
                told += f", {number(here.low)} to {number(here.high)}"
        box = f'x="{edges[at]:.1f}" y="{_TOP}" width="{edges[at + 1] - edges[at]:.1f}"'
        yield f'<rect class="tip" {box} height="{_HEIGHT - _TOP - _BOTTOM}"><title>{safe(told)}</title></rect>'


def _within(points: Sequence[Point], column: Point) -> Point:
    """Return the points that share steps with a column, as one; the nearest where none does."""
    first = bisect_left([point.last for point in points], column.first)
    last = bisect_right([point.first for point in points], column.last)
    if first < last:
        return merged(points[first:last])
    return min(points[max(0, first - 1) : first + 1], key=lambda point: abs(point.step - column.step))
