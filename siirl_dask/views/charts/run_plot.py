"""Draws ``plot.svg`` from ``<run.url>/metrics.jsonl``: mean reward and its spread, validation
reward, entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from siirl_storage import open_fs, write_atomic

from siirl_dask.observe import Record, read_metrics
from siirl_dask.views.charts.colours import COLOURS, class_of
from siirl_dask.views.charts.colours import rules as colour_rules
from siirl_dask.views.charts.curves import ENTROPY, REWARD, VALIDATION, Panel, curves
from siirl_dask.views.charts.figures import number
from siirl_dask.views.charts.line_chart import HEIGHT, LEFT, MOST_POINTS, WIDTH, line_chart, rules
from siirl_dask.views.charts.series import Curve
from siirl_dask.views.html_page import safe

_PANELS = (REWARD, VALIDATION, ENTROPY)
_APART = 24
_HEAD = 64  # pixels above the charts: the title, the panels' titles, their legends
_FOOT = 16
_INK = "#1f2328"
_DIM = "#656d76"
_GRID = "#d9dee3"
_STYLE = (
    f"{rules(_DIM, _GRID)}\n{colour_rules([colour.light for colour in COLOURS])}\n"
    f"svg .title {{ font: bold 15px system-ui, sans-serif; fill: {_INK} }} svg .panel {{ "
    f"font-size: 12px }}\n"
    "svg .key { fill: currentColor; font-weight: bold }"
)


def plot_run(url: str, svg_url: str, title: str | None = None) -> None:
    """Draw the run at ``url`` into an SVG at ``svg_url``, any fsspec URL.

    The default title is the name of the run's folder. A panel whose metric was not logged says so.
    DataError without metrics.
    """
    records = read_metrics(url)
    fs, path = open_fs(svg_url)
    write_atomic(fs, path, draw(records, title or url.rstrip("/").rpartition("/")[2]).encode())


def draw(records: Sequence[Record], title: str) -> str:
    """Return the plot as SVG that needs nothing else."""
    width = len(_PANELS) * (WIDTH + _APART) + _APART
    height = _HEAD + HEIGHT + _FOOT
    steps = [record["step"] for record in records]
    panels = []
    for at, panel in enumerate(_PANELS):
        left = _APART // 2 + at * (WIDTH + _APART)
        panels.append(
            f'<g transform="translate({left},{_HEAD})">{_panel(records, panel, steps)}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}">'
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text class="title" x="{width / 2:.0f}" y="22" text-anchor="middle">{safe(title)}</text>'
        f"{''.join(panels)}</svg>\n"
    )


def _panel(records: Sequence[Record], panel: Panel, steps: Sequence[int]) -> str:
    head = f'<text class="panel" x="{LEFT}" y="-22">{safe(panel.title)}</text>'
    drawn = [_share(curve) for curve in curves(records, panel, MOST_POINTS)]
    if not drawn:
        return (
            f'{head}<text x="{WIDTH / 2:.0f}" y="{HEIGHT / 2:.0f}" text-anchor="middle">not '
            "logged</text>"
        )
    keys = "&#160;&#160; ".join(map(_key, drawn))
    if any(line.spread for line in panel.lines) and any(curve.has_band for curve in drawn):
        keys += "&#160;&#160; &#177; 1 standard deviation"
    legend = f'<text x="{LEFT}" y="-6">{keys}</text>'
    axis = f'<text x="{WIDTH / 2 + LEFT / 2:.0f}" y="{HEIGHT + 8}" text-anchor="middle">step</text>'
    return f"{head}{legend}{line_chart(drawn, steps=(min(steps), max(steps)))}{axis}"


def _key(curve: Curve) -> str:
    """Return a curve's name in its colour, and its first and newest value."""
    first = ""
    if len(curve.points) > 1:
        first = f"{number(curve.points[0].mean)} to "
    name = f'<tspan class="key {class_of(curve.number)}">{safe(curve.label)}</tspan>'
    return f"{name} {first}{number(curve.newest)}"


def _share(curve: Curve) -> Curve:
    """Return the curve, with a band that ends at 0 and 1 where all its values are most likely
    shares.
    """
    if not all(0 <= value <= 1 for value in curve.values):
        return curve
    points = [
        replace(point, low=max(point.low, 0.0), high=min(point.high, 1.0)) for point in curve.points
    ]
    return replace(curve, points=points)
