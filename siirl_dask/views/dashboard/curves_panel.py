"""The panel of metric curves: this run's, and over them those of sibling runs that the viewer
chooses.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import BasicTicker, ColumnDataSource
from bokeh.models.glyphs import MultiLine, Patches, Scatter
from bokeh.models.widgets import Div, Select
from bokeh.plotting import figure

from siirl_dask.observe import Record
from siirl_dask.views.charts.curves import PANELS, REWARD, Line, Panel, curves, other_metrics
from siirl_dask.views.charts.series import Curve
from siirl_dask.views.dashboard.style import LINES, TEXTS, WIDGETS, grid, hover_over, plot

_DASHES = ("solid", "dashed", "dotted", "dotdash")
_CHOSEN = ("seconds/rollout", "tokens_per_second", "policy/grad_norm")
_LEAST = 330  # pixels of a panel
_NOISE = 1e-9  # what is never larger is rounding
_FEW_POINTS = 30  # of a curve: its points are drawn larger


class CurvesPanel:
    """Draws the panels of ``observe.curves``, and three whose metric the viewer chooses."""

    def __init__(self) -> None:
        self._drawn = [_Drawn(panel.title) for panel in PANELS]
        self._free = [_Drawn("") for _ in _CHOSEN]
        self._choices = [
            Select(
                options=list[str | tuple[Any, str]]([name]),
                value=name,
                sizing_mode="stretch_width",
                height=28,
                stylesheets=[WIDGETS],
            )
            for name in _CHOSEN
        ]
        self._runs: Mapping[str, Sequence[Record]] = {}
        for choice in self._choices:
            choice.on_change("value", lambda attribute, old, new: self._draw_free())
        fixed = [one.root for one in self._drawn]
        free = [
            column(choice, one.root, sizing_mode="stretch_width")
            for choice, one in zip(self._choices, self._free, strict=True)
        ]
        self.root = grid([*fixed, *free], least=_LEAST)

    @property
    def figures(self) -> list[figure]:
        return [one.figure for one in (*self._drawn, *self._free)]

    def show(self, runs: Mapping[str, Sequence[Record]]) -> None:
        """Show the records of runs by name, the one that is watched first."""
        self._runs = runs
        own = next(iter(runs.values()), ())
        names = other_metrics(own)
        for choice in self._choices:
            options: list[str | tuple[Any, str]] = [*names]
            if choice.value not in names:
                options = [choice.value, *names]
            if choice.options != options:
                choice.options = options
        for drawn, panel in zip(self._drawn, PANELS, strict=True):
            found = {name: curves(records, panel) for name, records in runs.items()}
            drawn.show(found)
            says_something = any(map(_says_something, found.values()))
            if panel is REWARD:
                says_something = True
            drawn.root.visible = says_something
        self._draw_free()

    def _draw_free(self) -> None:
        for choice, drawn in zip(self._choices, self._free, strict=True):
            panel = Panel(choice.value, (Line(choice.value),))
            drawn.show({name: curves(records, panel) for name, records in self._runs.items()})


class _Drawn:
    """A figure whose lines are rows of one source: there may be any number of them."""

    def __init__(self, title: str) -> None:
        tips = [("", "@label"), ("step", "@x"), ("value", "@y{0.0000 a}")]
        self.figure = plot("", tips, height=150)
        for axis in self.figure.xaxis:
            axis.ticker = BasicTicker(min_interval=1)
        self._lines = ColumnDataSource(_no_lines())
        self._bands = ColumnDataSource(_no_bands())
        self._points = ColumnDataSource(_no_points(), name=f"curve {title}")
        bands = Patches(xs="xs", ys="ys", fill_color="colour", fill_alpha=0.16, line_color=None)
        lines = MultiLine(xs="xs", ys="ys", line_color="colour", line_dash="dash", line_width=1.8)
        dots = Scatter(
            x="x",
            y="y",
            size="size",
            fill_color="colour",
            line_color=None,
            fill_alpha=0.9,
        )
        # not figure.patches(), which makes three glyphs more of each
        self.figure.add_glyph(self._bands, bands)
        self.figure.add_glyph(self._lines, lines)
        points = self.figure.add_glyph(self._points, dots)
        hover_over(self.figure, [points])
        self._head = Div(
            text=html.escape(title),
            stylesheets=[TEXTS],
            sizing_mode="stretch_width",
            margin=(4, 5, 0, 8),
        )
        self._title = title
        parts: list[Any] = [self.figure]
        if title:
            parts = [self._head, self.figure]
        self.root = column(parts, sizing_mode="stretch_width")

    def show(self, runs: Mapping[str, Sequence[Curve]]) -> None:
        lines = _no_lines()
        bands = _no_bands()
        points = _no_points()
        several = sum(bool(own) for own in runs.values()) > 1
        for number, (run, own) in enumerate(runs.items()):
            for index, curve in enumerate(own):
                colour = LINES[index % len(LINES)]
                dash = "solid"
                label = curve.label
                if several:
                    colour = LINES[number % len(LINES)]
                    dash = _DASHES[index % len(_DASHES)]
                    label = f"{run}, {curve.label}"
                if several and len(own) == 1:
                    label = run
                lines["xs"].append(curve.steps)
                lines["ys"].append(curve.values)
                lines["colour"].append(colour)
                lines["dash"].append(dash)
                lines["label"].append(label)
                if number == 0 and curve.has_band:
                    bands["xs"].append([*curve.steps, *reversed(curve.steps)])
                    bands["ys"].append([*curve.high, *reversed(curve.low)])
                    bands["colour"].append(colour)
                size = 2
                if len(curve.steps) <= _FEW_POINTS:
                    size = 5
                points["x"] += curve.steps
                points["y"] += curve.values
                points["label"] += [label] * len(curve.steps)
                points["colour"] += [colour] * len(curve.steps)
                points["size"] += [size] * len(curve.steps)
        self.figure.visible = bool(lines["xs"])
        self._bands.data = bands
        self._lines.data = lines
        self._points.data = points
        keys = [
            f'<span class="key" style="background:{colour}"></span>{html.escape(label)}'
            for label, colour in zip(lines["label"], lines["colour"], strict=True)
        ]
        shown = ""
        if len(keys) > 1:
            shown = "".join(keys)
        elif not keys:
            shown = '<span class="soft"> &nbsp; not logged</span>'
        self._head.text = f"<b>{html.escape(self._title)}</b>{shown}"


def _says_something(curves_of_run: Sequence[Curve]) -> bool:
    """Return whether any value is more than the noise of adding numbers in another order."""
    return any(abs(value) > _NOISE for curve in curves_of_run for value in curve.values)


def _no_lines() -> dict[str, list[Any]]:
    return {"xs": [], "ys": [], "colour": [], "dash": [], "label": []}


def _no_bands() -> dict[str, list[Any]]:
    return {"xs": [], "ys": [], "colour": []}


def _no_points() -> dict[str, list[Any]]:
    return {"x": [], "y": [], "label": [], "colour": [], "size": []}
