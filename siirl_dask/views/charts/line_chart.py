"""Draws a line chart as SVG, without a script: colours are classes, and what a point says is its
tooltip.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from siirl_dask.views.charts.colours import class_of
from siirl_dask.views.charts.figures import number, numbers
from siirl_dask.views.charts.series import Curve, Point, merged
from siirl_dask.views.html_page import safe

WIDTH = 360
HEIGHT = 190
LEFT = 46
MOST_POINTS = 240
"""Points of a curve that a chart has room for."""
_RIGHT = 8
_TOP = 8
_BOTTOM = 22
_TOOLTIPS = 80  # of a chart
_DOTS = 16  # points up to which each is marked
_LEAST = 1e-300  # difference that is drawn


def rules(dim: str, line: str) -> str:
    """Return the CSS rules of charts, with the colours of their texts and of their grid."""
    return (
        f"svg text {{ font: 10.5px system-ui, sans-serif; fill: {dim} }} svg .g {{ stroke: {line}; "
        f"stroke-width: 1 }}\n"
        f"svg .tip {{ fill: transparent }} svg .tip:hover {{ fill: {line}; fill-opacity: .45 }}\n"
        "svg polyline { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: "
        "round }\n"
        "svg polygon.band { fill: currentColor; fill-opacity: .18 } svg circle { fill: "
        "currentColor }\n"
        "svg .dash { stroke-dasharray: 5 3 }"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps steps and values to the drawing."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - _RIGHT)

    def y(self, value: float) -> float:
        inner = HEIGHT - _TOP - _BOTTOM
        # halves are finite
        return _TOP + inner - (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2) * inner


def line_chart(
    curves: Sequence[Curve], *, tooltips: bool = True, steps: tuple[int, int] | None = None
) -> str:
    """Return the elements of a chart of ``WIDTH`` x ``HEIGHT`` with all curves, of which each has a
    point.

    ``steps`` are the first and the last step of the axis; None: those of the curves.
    """
    points = [point for curve in curves for point in curve.points]
    if steps is None:
        steps = (min(point.first for point in points), max(point.last for point in points))
    scale = _scale(points, steps[0], steps[1])
    parts = [*_grid(scale)]
    for curve in curves:
        parts += _line(curve, scale)
    if tooltips:
        parts += _tooltips(curves, scale)
    return "".join(parts)


def _scale(points: Sequence[Point], first: int, last: int) -> _Scale:
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    if high / 2 - low / 2 < _LEAST:
        apart = 1.0
        if low:
            apart = max(abs(low) / 10, _LEAST)
        low = low - apart
        high = high + apart
    else:
        margin = 0.0
        if math.isfinite(high - low):
            margin = (high - low) / 20
        low = low - margin * (low < 0 or low > margin)
        high = high + margin
    return _Scale(first - (first == last) / 2, last + (first == last) / 2, low, high)


def ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return at most ``most`` round numbers, 4 or more, from ``low`` to ``high``, evenly and at
    least ``least`` apart.

    ``low`` is below ``high``; where their difference is too small or too large for that, both.
    """
    rough = max((high - low) / (most - 1), least)
    if not math.isfinite(rough) or rough <= 0:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(
        (factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), 10 * power
    )
    if apart == 0 or low + apart == low:
        return [low, high]
    first = math.ceil(low / apart)
    found = [count * apart for count in range(first, first + most)]
    return [value for value in found if value <= high]


def _grid(scale: _Scale) -> Iterator[str]:
    marked = ticks(scale.low, scale.high, 7)
    for value, text in zip(marked, numbers(marked), strict=True):
        y = scale.y(value)
        yield f'<line class="g" x1="{LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    for step in ticks(scale.first, scale.last, 7, least=1.0):
        yield (
            f'<text x="{scale.x(step):.1f}" y="{HEIGHT - 6}" '
            f'text-anchor="middle">{int(step):,}</text>'
        )


def _line(curve: Curve, scale: _Scale) -> Iterator[str]:
    colour = class_of(curve.number)
    if curve.has_band:
        above = [f"{scale.x(point.step):.1f},{scale.y(point.high):.1f}" for point in curve.points]
        below = [
            f"{scale.x(point.step):.1f},{scale.y(point.low):.1f}"
            for point in reversed(curve.points)
        ]
        yield f'<polygon class="band {colour}" points="{" ".join([*above, *below])}"/>'
    places = [(scale.x(point.step), scale.y(point.mean)) for point in curve.points]
    yield f'<polyline class="{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    if len(places) <= _DOTS:
        yield from (
            f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places
        )


def _tooltips(curves: Sequence[Curve], scale: _Scale) -> Iterator[str]:
    """Yield invisible columns over the chart, each of which tells every curve's values there."""
    longest = max((curve.points for curve in curves), key=len)
    every = -(-len(longest) // _TOOLTIPS)
    columns = [merged(longest[at : at + every]) for at in range(0, len(longest), every)]
    places = [scale.x(column.step) for column in columns]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - _RIGHT]
    for at, column in enumerate(columns):
        tip = f"step {column.first:,}"
        if column.last > column.first:
            tip += f" to {column.last:,}"
        for curve in curves:
            here = _within(curve.points, column)
            tip += f"\n{number(here.mean)}  {curve.label}"
            if here.low < here.high:
                tip += f", {number(here.low)} to {number(here.high)}"
        box = f'x="{edges[at]:.1f}" y="{_TOP}" width="{edges[at + 1] - edges[at]:.1f}"'
        yield (
            f'<rect class="tip" {box} '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{safe(tip)}</title></rect>'
        )


def _within(points: Sequence[Point], column: Point) -> Point:
    """Return the points that share steps with a column, as one; the nearest where none does."""
    first = bisect_left([point.last for point in points], column.first)
    last = bisect_right([point.first for point in points], column.last)
    if first < last:
        return merged(points[first:last])
    return min(
        points[max(0, first - 1) : first + 1], key=lambda point: abs(point.step - column.step)
    )
