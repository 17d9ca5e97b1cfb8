"""The panel of the workers: what each does and holds, tokens and memory side by side, and bytes
from one to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, LogColorMapper
from bokeh.models.widgets import DataTable, Div, NumberFormatter, TableColumn
from bokeh.plotting import figure

from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.observe.trace.transfers import Transfers
from siirl_dask.trace import Lane
from siirl_dask.views.charts.figures import size
from siirl_dask.views.dashboard.columns import Columns, numbers, show_columns
from siirl_dask.views.dashboard.style import (
    LINES,
    STORAGE,
    TABLE,
    TEXTS,
    grid,
    hover_over,
    plot,
    redraw_rows,
)
from siirl_dask.worker.monitoring.work import Work

_MOST = 32  # workers in a plot
_CELLS = 10  # workers of a matrix with figures in its cells
_BLUES = ("#dcebf7", "#b5d3ec", "#86b7dd", "#5898ca", "#3579b5", "#1d5b97", "#0f3f70")
_MB = 1e6


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as the scheduler knows it."""

    worker: str
    host: str
    place: str
    rate: float
    """Things that it gets done a second: tokens of all its rows at once, micro-batches, scored
    rows."""
    tokens: float
    """Tokens that it generated in the last step."""
    memory: int
    """Bytes of its process."""
    spilled: int
    """Bytes of rows and Dask's own data on its disk."""
    load: Work
    """The load of its engine, its arena and its device."""
    silent: float
    """Seconds since its last heartbeat."""


class WorkersPanel:
    """Draws the workers of a run."""

    def __init__(self) -> None:
        self._table_source = ColumnDataSource({name: [] for name in _COLUMNS}, name="worker rows")
        columns = [
            TableColumn(field=name, title=title, width=width, **_format(name))
            for name, (title, width) in _COLUMNS.items()
        ]
        table = DataTable(
            source=self._table_source, columns=columns, height=170, sizing_mode="stretch_width", index_position=None,
            min_width=900, stylesheets=[TABLE], autosize_mode="force_fit", reorderable=False,
        )  # fmt: skip
        redraw_rows(table)
        self._bars = ColumnDataSource({name: [] for name in ("worker", "tokens", *_HELD)})
        self._names = FactorRange()
        self._tokens = self._bar_plot(
            "tokens generated, last step", "@tokens{0,0}", [("tokens", LINES[0])]
        )
        tip = " ".join(f"@{name}{{0,0}} {name}" for name in _HELD)
        self._memory = self._bar_plot("memory, spilled, device, MB", tip, list(_HELD.items()))
        self._cells = ColumnDataSource(
            {name: [] for name in ("source", "target", "nbytes", "note", "way", "text")},
            name="matrix",
        )
        self._sources = FactorRange()
        self._targets = FactorRange()
        self._matrix = plot(
            "bytes that moved: from the worker at the left to the one below",
            [("from, to", "@source, @target"), ("", "@note"), ("by", "@way")],
            x_range=self._targets,
            y_range=self._sources,
            height=220,
        )
        mapper = LogColorMapper(palette=_BLUES, low=1, high=10)
        self._mapper = mapper
        cells = self._matrix.rect(
            x="target", y="source", width=0.96, height=0.94, source=self._cells, line_color=None,
            fill_color={"field": "nbytes", "transform": mapper},
        )  # fmt: skip
        self._matrix.text(
            x="target", y="source", text="text", source=self._cells, text_align="center", text_baseline="middle",
            text_font_size="11px", text_color="text_colour",
        )  # fmt: skip
        self._cells.data["text_colour"] = []
        hover_over(self._matrix, [cells])
        self._matrix.grid.visible = False
        self._engine = ColumnDataSource({"xs": [], "ys": [], "worker": [], "colour": []})
        self._requests = plot(
            "requests that engines have under way",
            [("worker", "@worker")],
            height=220,
            y_range=DataRange1d(start=0),
        )
        lines = self._requests.multi_line(
            "xs",
            "ys",
            source=self._engine,
            line_color="colour",
            line_width=1.6,
        )
        hover_over(self._requests, [lines])
        self._requests.xaxis.axis_label = "seconds"
        plots = grid([self._matrix, self._requests, self._tokens, self._memory], least=330)
        self._table = column(table, sizing_mode="stretch_width", styles={"overflow-x": "auto"})
        self._nothing = Div(
            text='<span class="soft">nothing is known of the workers yet</span>',
            stylesheets=[TEXTS],
        )
        self.root = column(self._nothing, self._table, plots, sizing_mode="stretch_width")
        for one in (self._table, *self.figures):
            one.visible = False

    @property
    def figures(self) -> list[figure]:
        return [self._matrix, self._requests, self._tokens, self._memory]

    def show_states(self, states: Sequence[WorkerState]) -> None:
        """Show the workers as they are now."""
        for one in (self._table, self._tokens, self._memory):
            one.visible = bool(states)
        if not states:  # a run that is over, or is looked at from its folder
            return
        self._nothing.visible = False
        by_name = {one.worker: one for one in states}
        states = [by_name[name] for name in in_order(by_name)]
        tokens = numbers(one.tokens for one in states)
        sizes = {
            "memory": numbers(one.memory // _MB for one in states),
            "spilled": numbers(one.spilled // _MB for one in states),
            "device": numbers(one.load.device // _MB for one in states),
        }
        table: Columns = {
            "worker": [one.worker for one in states],
            "host": [one.host for one in states],
            "place": [
                one.place if one.silent < 10 else f"silent for {one.silent:.0f} s" for one in states
            ],
            "rate": numbers(round(one.rate, 1) for one in states),
            "tokens": tokens,
            "arena": numbers(one.load.arena // _MB for one in states),
            "requests": [_engine(one.load) for one in states],
            **sizes,
        }
        show_columns(self._table_source, table)
        shown = states[:_MOST]
        names = [one.worker for one in shown]
        if self._names.factors != names:
            self._names.factors = names
        bars: Columns = {"worker": names} | {
            name: column[:_MOST] for name, column in {"tokens": tokens, **sizes}.items()
        }
        show_columns(self._bars, bars)

    def show_traced(
        self, moved: Transfers, requests: Mapping[str, Sequence[tuple[float, int]]]
    ) -> None:
        """Show bytes that were moved, and each engine's requests over seconds."""
        self._matrix.visible = bool(moved.ways)
        self._requests.visible = any(requests.values())
        if self._matrix.visible or self._requests.visible:
            self._nothing.visible = False
        sums: dict[str, int] = {}
        for pair, ways in moved.ways.items():
            for name in pair:
                sums[name] = sums.get(name, 0) + ways.total()
        shown = in_order(sorted(sums, key=lambda name: -sums[name])[:_MOST])
        pairs = {pair: ways for pair, ways in moved.ways.items() if {*pair} <= {*shown}}
        most = max((ways.total() for ways in pairs.values()), default=1)
        self._mapper.low = max(1, most / 1e4)
        self._mapper.high = max(10, most)
        self._targets.factors = shown
        self._sources.factors = shown[::-1]
        self._cells.data = {
            "source": [source for source, _ in pairs],
            "target": [target for _, target in pairs],
            "nbytes": [ways.total() for ways in pairs.values()],
            "note": [f"{ways.total():,} bytes" for ways in pairs.values()],
            "way": [
                ", ".join(f"{way} {count:,}" for way, count in ways.items())
                for ways in pairs.values()
            ],
            "text": [size(ways.total()) if len(shown) <= _CELLS else "" for ways in pairs.values()],
            "text_colour": [
                "#ffffff" if ways.total() > most / 10 else "#10202f" for ways in pairs.values()
            ],
        }
        workers = in_order(requests)[:_MOST]
        self._engine.data = {
            "xs": [[at for at, _ in requests[worker]] for worker in workers],
            "ys": [[count for _, count in requests[worker]] for worker in workers],
            "worker": workers,
            "colour": [LINES[number % len(LINES)] for number in range(len(workers))],
        }

    def _bar_plot(self, title: str, tip: str, bars: Sequence[tuple[str, str]]) -> figure:
        fig = plot(
            title,
            [("worker", "@worker"), ("", tip)],
            x_range=self._names,
            y_range=DataRange1d(start=0),
            height=220,
        )
        fig.xgrid.visible = False
        drawn = fig.vbar_stack(
            [name for name, _ in bars],
            x="worker",
            width=0.6,
            source=self._bars,
            color=[colour for _, colour in bars],
        )
        hover_over(fig, drawn)
        return fig


_COLUMNS = {
    "worker": ("worker", 70),
    "host": ("host", 130),
    "place": ("where it is", 300),
    "rate": ("beats a second", 90),
    "tokens": ("tokens", 90),
    "memory": ("memory, MB", 90),
    "spilled": ("spilled, MB", 90),
    "arena": ("arena, MB", 90),
    "device": ("device, MB", 90),
    "requests": ("engine: under way, waiting, cache", 190),
}
_HELD = {"memory": LINES[2], "spilled": STORAGE, "device": LINES[3]}
"""Colours of what a worker holds, stacked in one bar: its memory has the arena within."""


def _format(name: str) -> dict[str, Any]:
    if name in ("worker", "host", "place", "requests"):
        return {}
    return {
        "formatter": NumberFormatter(
            format="0,0.0" if name == "rate" else "0,0", text_align="right"
        )
    }


def _engine(load: Work) -> str:
    """Return the queue of an engine, and the use of its cache where it has a bounded one."""
    cache = ""
    if load.cache:
        cache = f", {load.cache:.0%}"
    if load.requests or cache:
        return f"{load.requests}, {load.waiting} waiting{cache}"
    return ""


def engine_requests(spans: Sequence[TraceSpan], first: int) -> dict[str, list[tuple[float, int]]]:
    """Return the points of each engine's requests under way: seconds since ``first``, and their
    number, as steps.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for span in spans:
        if span.is_count and span.lane is Lane.ENGINE and span.name == "requests":
            points = found.setdefault(span.worker, [])
            at = (span.start - first) / 1e9
            if points:
                points.append((at, points[-1][1]))
            points.append((at, span.amount or 0))
    return found
