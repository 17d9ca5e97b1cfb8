"""The panel of the timeline: the last steps from the trace, and the last two minutes from the
workers' pulses.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FactorRange, Range1d
from bokeh.models.glyphs import HBar
from bokeh.models.widgets import Div
from bokeh.plotting import figure

from siirl_dask.observe.trace.trace_table import in_order
from siirl_dask.trace import Lane
from siirl_dask.views.dashboard.columns import Columns, numbers, show_columns
from siirl_dask.views.dashboard.live import IDLE, Live, Stay
from siirl_dask.views.dashboard.style import (
    CRITICAL,
    OWN,
    STORAGE,
    TEXTS,
    TRANSFER,
    WAIT,
    colour_of,
    hover_over,
    plot,
)
from siirl_dask.views.dashboard.timeline import Bar, Timeline

MOST_LANES = 48
_HEIGHT = 0.56
_THIN = 0.14
_SECONDS = 120.0
_PIXELS = 26  # of a lane
_ALPHAS = {Lane.WAIT: 0.15, Lane.CONTROL: 0.35}
_LANES = {
    Lane.TRANSFER: TRANSFER,
    Lane.STORAGE: STORAGE,
    Lane.WAIT: WAIT,
    Lane.CONTROL: OWN,
    Lane.ENGINE: OWN,
}


class TimelinePanel:
    """Draws a lane per worker: its chain, thinner what it moves beside it, and in red where the
    step's end waited.
    """

    def __init__(self) -> None:
        tips = [
            ("worker", "@worker"),
            ("", "@kind @name"),
            ("seconds", "@seconds{0.0000}"),
            ("waits for", "@cause"),
            ("bytes", "@nbytes"),
            ("step", "@step"),
        ]
        self._bars = ColumnDataSource(_no_bars(), name="timeline bars")
        self._path = ColumnDataSource(
            {"y": [], "left": [], "right": [], "worker": [], "name": [], "seconds": []}
        )
        zoom = {"tools": "xbox_zoom,xpan,xwheel_zoom,reset", "toolbar_location": "right"}
        self._lanes = FactorRange()
        self._lanes_now = FactorRange()
        self._window = Range1d(start=0, end=1)
        self._past = plot("", tips, y_range=self._lanes, x_range=self._window, height=150, **zoom)
        self._past.toolbar.active_scroll = None  # the wheel scrolls the page
        self._past.toolbar.logo = None
        bars = self._past.add_glyph(self._bars, _hbar("y", "height"))
        path = HBar(
            y="y",
            left="left",
            right="right",
            height=0.09,
            fill_color=CRITICAL,
            line_color=None,
        )
        self._past.add_glyph(self._path, path)
        hover_over(self._past, [bars])
        self._past.xaxis.axis_label = "seconds"
        stays = [("worker", "@worker"), ("", "@name"), ("for", "@seconds{0.0} s"), ("", "@note")]
        self._stays = ColumnDataSource(_no_stays(), name="live bars")
        self._now = plot(
            "",
            stays,
            y_range=self._lanes_now,
            x_range=Range1d(start=-_SECONDS, end=0),
            height=120,
        )
        shown = self._now.add_glyph(self._stays, _hbar("worker", _HEIGHT))
        hover_over(self._now, [shown])
        self._now.xaxis.axis_label = "seconds ago, by the workers' heartbeats"
        for fig in (self._past, self._now):
            fig.ygrid.visible = False
            fig.min_border_left = 70
        self._caption = Div(
            text="",
            name="timeline remark",
            stylesheets=[TEXTS],
            sizing_mode="stretch_width",
        )
        self._key = Div(text="", stylesheets=[TEXTS], sizing_mode="stretch_width")
        self.root = column(
            self._caption, self._past, self._key, self._now, sizing_mode="stretch_width"
        )

    @property
    def figures(self) -> list[figure]:
        return [self._past, self._now]

    def show(self, past: Timeline | None, nodes: Sequence[str], title: str, remark: str) -> None:
        """Show steps of a trace; ``nodes`` is the order of their colours, ``remark`` why there
        is nothing new.
        """
        caption = title
        if remark:
            caption += f' <span class="bad">{html.escape(remark)}</span>'
        self._caption.text = caption
        if past is None:
            self._bars.data = _no_bars()
            self._path.data = {name: [] for name in self._path.data}
            self._past.visible = self._key.visible = False
            return
        self._past.visible = self._key.visible = bool(past.bars)
        bars = past.bars
        places = _places(past.workers)
        data = {
            "y": numbers(places[bar.worker] + (0.36 if bar.beside else 0.0) for bar in bars),
            "left": numbers(bar.start for bar in bars),
            "right": numbers(bar.end for bar in bars),
            "height": numbers(_THIN if bar.beside else _HEIGHT for bar in bars),
            "colour": [_colour(bar, nodes) for bar in bars],
            "alpha": numbers(_ALPHAS.get(bar.lane, 0.95) for bar in bars),
            "hatch": ["right_diagonal_line" if bar.lane is Lane.WAIT else " " for bar in bars],
            "worker": [bar.worker for bar in bars],
            "kind": [_kind(bar) for bar in bars],
            "name": [bar.name for bar in bars],
            "seconds": numbers(bar.end - bar.start for bar in bars),
            "cause": [bar.waits_for for bar in bars],
            "nbytes": ["" if bar.amount is None else f"{bar.amount:,}" for bar in bars],
            "step": numbers(bar.step for bar in bars),
        }
        self._lanes.factors = list(reversed(past.workers))
        self._window.end = past.seconds if past.seconds else 1
        self._past.height = 60 + _PIXELS * max(1, len(past.workers))
        self._bars.data = data
        path = [one for one in past.critical if one.worker in places]
        self._path.data = {
            "y": numbers(places[one.worker] - 0.38 for one in path),
            "left": numbers(one.start for one in path),
            "right": numbers(one.end for one in path),
            "worker": [one.worker for one in path],
            "name": [one.name for one in path],
            "seconds": numbers(one.end - one.start for one in path),
        }
        self._key.text = _key(past, nodes)

    def show_now(self, live: Live, now: float, nodes: Sequence[str]) -> None:
        """Show where workers are at ``now``, by the clock of the times in ``live``."""
        workers = in_order(live.stays)[:MOST_LANES]
        stays = [(worker, stay) for worker in workers for stay in live.stays[worker]]
        data: Columns = {
            "worker": [worker for worker, _ in stays],
            "left": numbers(max(-_SECONDS, stay.start - now) for _, stay in stays),
            "right": numbers(stay.end - now for _, stay in stays),
            "colour": [
                WAIT if stay.waits or stay.place == IDLE else colour_of(stay.place, nodes)
                for _, stay in stays
            ],
            "alpha": numbers(_opacity(stay) for _, stay in stays),
            "hatch": ["right_diagonal_line" if stay.waits else " " for _, stay in stays],
            "name": [stay.place for _, stay in stays],
            "seconds": numbers(stay.end - stay.start for _, stay in stays),
            "note": ["waits for other workers" if stay.waits else "" for _, stay in stays],
        }
        if list(reversed(workers)) != self._lanes_now.factors:
            self._lanes_now.factors = list(reversed(workers))
            self._now.height = 60 + _PIXELS * max(1, len(workers))
        self._now.visible = bool(workers)
        show_columns(self._stays, data)


def _hbar(y: str, height: str | float) -> HBar:
    return HBar(
        y=y,
        left="left",
        right="right",
        height=height,
        fill_color="colour",
        fill_alpha="alpha",
        line_color=None,
        hatch_pattern="hatch",
        hatch_color=WAIT,
        hatch_alpha=0.55,
        hatch_scale=7,
    )


def _no_bars() -> dict[str, list[object]]:
    names = (
        "y",
        "left",
        "right",
        "height",
        "colour",
        "alpha",
        "hatch",
        "worker",
        "kind",
        "name",
        "seconds",
        "cause",
    )
    return {name: [] for name in (*names, "nbytes", "step")}


def _no_stays() -> dict[str, list[object]]:
    return {
        name: []
        for name in (
            "worker",
            "left",
            "right",
            "colour",
            "alpha",
            "hatch",
            "name",
            "seconds",
            "note",
        )
    }


def _places(workers: Sequence[str]) -> dict[str, float]:
    """Return the middle of each worker's lane by the numbers that Bokeh gives to lanes, from the
    lowest one on.
    """
    return {worker: len(workers) - number - 0.5 for number, worker in enumerate(workers)}


def _opacity(stay: Stay) -> float:
    """Return how opaque a stay is drawn: faint where the worker does nothing."""
    if stay.waits:
        return 0.15
    if stay.place == IDLE:
        return 0.05
    return 0.95


def _colour(bar: Bar, nodes: Sequence[str]) -> str:
    if bar.lane is Lane.COMPUTE:
        return colour_of(bar.name, nodes)
    return _LANES[bar.lane]


def _kind(bar: Bar) -> str:
    kinds: Mapping[Lane, str] = {Lane.COMPUTE: "node", Lane.CONTROL: "", Lane.WAIT: "waits:"}
    return kinds.get(bar.lane, bar.what)


def _key(past: Timeline, nodes: Sequence[str]) -> str:
    shown = [
        node
        for node in nodes
        if any(bar.lane is Lane.COMPUTE and bar.name == node for bar in past.bars)
    ]
    entries = [(node, f"background:{colour_of(node, nodes)}") for node in shown]
    entries += [("transfer", f"background:{TRANSFER}"), ("storage", f"background:{STORAGE}")]
    stripes = f"background:repeating-linear-gradient(45deg,{WAIT}66 0 2px,transparent 2px 5px)"
    entries += [("waits", stripes), ("between nodes", f"background:{OWN}59")]
    entries.append(("critical path", f"background:{CRITICAL};height:3px;vertical-align:3px"))
    boxes = (
        f'<span class="key" style="{style}"></span>{html.escape(name)}' for name, style in entries
    )
    left = ""
    if past.left_out:
        left = f'<span class="soft">&nbsp; {past.left_out:,} bars too short to be seen are left out</span>'
    return "".join(boxes) + left
