"""The panel of the workers: what each does and holds, tokens and memory side by side, and bytes from one to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, LogColorMapper
from bokeh.models.widgets import DataTable, NumberFormatter, TableColumn
from bokeh.plotting import figure

from siirl_dask.observe.dashboard.style import LINES, STORAGE, TABLE, hover_over, plot, redraw_rows
from siirl_dask.observe.trace_table import TraceSpan, in_order
from siirl_dask.observe.transfers import Transfers
from siirl_dask.trace import Lane

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
    """Things that it gets done a second: tokens of all its rows at once, micro-batches, scored rows."""
    tokens: float
    """Tokens that it generated in the last step."""
    memory: int
    """Bytes of its process."""
    spilled: int
    """Bytes of rows and Dask's own data on its disk."""
    device_memory: int
    """Bytes on its accelerator; 0 where it tells none."""
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
            stylesheets=[TABLE], autosize_mode="force_fit", reorderable=False,
        )  # fmt: skip
        redraw_rows(table)
        self._bars = ColumnDataSource({name: [] for name in ("worker", "tokens", "memory", "spilled", "device")})
        self._names = FactorRange()
        self._tokens = self._bar_plot("tokens generated, last step", "@tokens{0,0}", [("tokens", LINES[0])])
        memory = [("memory", LINES[2]), ("spilled", STORAGE), ("device", LINES[3])]
        self._memory = self._bar_plot("memory and spilled, MB", "@memory{0,0} @spilled{0,0} @device{0,0}", memory)
        self._cells = ColumnDataSource(
            {name: [] for name in ("source", "target", "nbytes", "told", "way", "text")}, name="matrix"
        )
        self._sources, self._targets = FactorRange(), FactorRange()
        self._matrix = plot(
            "bytes from (left) to (below), steps as above",
            [("from, to", "@source, @target"), ("", "@told"), ("by", "@way")],
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
        hover_over(self._matrix, cells)
        self._matrix.grid.visible = False
        self._engine = ColumnDataSource({"xs": [], "ys": [], "worker": [], "colour": []})
        self._requests = plot(
            "requests that engines have under way", [("worker", "@worker")], height=220, y_range=DataRange1d(start=0)
        )
        lines = self._requests.multi_line("xs", "ys", source=self._engine, line_color="colour", line_width=1.6)
        hover_over(self._requests, lines)
        self._requests.xaxis.axis_label = "seconds"
        plots = row(self._matrix, self._requests, self._tokens, self._memory, sizing_mode="stretch_width")
        self.root = column(table, plots, sizing_mode="stretch_width")

    @property
    def figures(self) -> list[figure]:
        return [self._matrix, self._requests, self._tokens, self._memory]

    def show_states(self, states: Sequence[WorkerState]) -> None:
        """Show the workers as they are now."""
        by_name = {one.worker: one for one in states}
        states = [by_name[name] for name in in_order(by_name)]
        self._table_source.data = {
            "worker": [one.worker for one in states],
            "host": [one.host for one in states],
            "place": [one.place if one.silent < 10 else f"silent for {one.silent:.0f} s" for one in states],
            "rate": [one.rate for one in states],
            "tokens": [one.tokens for one in states],
            "memory": [one.memory / _MB for one in states],
            "spilled": [one.spilled / _MB for one in states],
            "device": [one.device_memory / _MB for one in states],
        }
        shown = states[:_MOST]
        names = [one.worker for one in shown]
        if self._names.factors != names:
            self._names.factors = names
        self._bars.data = {
            "worker": names,
            "tokens": [one.tokens for one in shown],
            "memory": [one.memory / _MB for one in shown],
            "spilled": [one.spilled / _MB for one in shown],
            "device": [one.device_memory / _MB for one in shown],
        }

    def show_traced(self, moved: Transfers, requests: Mapping[str, Sequence[tuple[float, int]]]) -> None:
        """Show bytes that were moved, and each engine's requests over seconds."""
        sums: dict[str, int] = {}
        for pair, ways in moved.ways.items():
            for name in pair:
                sums[name] = sums.get(name, 0) + ways.total()
        shown = in_order(sorted(sums, key=lambda name: -sums[name])[:_MOST])
        pairs = {pair: ways for pair, ways in moved.ways.items() if {*pair} <= {*shown}}
        most = max((ways.total() for ways in pairs.values()), default=1)
        self._mapper.low, self._mapper.high = max(1, most / 1e4), max(10, most)
        self._targets.factors, self._sources.factors = shown, shown[::-1]
        self._cells.data = {
            "source": [source for source, _ in pairs],
            "target": [target for _, target in pairs],
            "nbytes": [ways.total() for ways in pairs.values()],
            "told": [f"{ways.total():,} bytes" for ways in pairs.values()],
            "way": [", ".join(f"{way} {count:,}" for way, count in ways.items()) for ways in pairs.values()],
            "text": [_short(ways.total()) if len(shown) <= _CELLS else "" for ways in pairs.values()],
            "text_colour": ["#ffffff" if ways.total() > most / 10 else "#10202f" for ways in pairs.values()],
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
            title, [("worker", "@worker"), ("", tip)], x_range=self._names, y_range=DataRange1d(start=0), height=220
        )
        fig.xgrid.visible = False
        drawn = fig.vbar_stack(
            [name for name, _ in bars], x="worker", width=0.6, source=self._bars, color=[colour for _, colour in bars]
        )
        hover_over(fig, *drawn)
        return fig


_COLUMNS = {
    "worker": ("worker", 70),
    "host": ("host", 130),
    "place": ("where it is", 300),
    "rate": ("beats a second", 90),
    "tokens": ("tokens", 90),
    "memory": ("memory, MB", 90),
    "spilled": ("spilled, MB", 90),
    "device": ("device, MB", 90),
}


def _format(name: str) -> dict[str, Any]:
    if name in ("worker", "host", "place"):
        return {}
    return {"formatter": NumberFormatter(format="0,0.0" if name == "rate" else "0,0", text_align="right")}


def _short(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return str(nbytes)


def engine_requests(spans: Sequence[TraceSpan], first: int) -> dict[str, list[tuple[float, int]]]:
    """Return the points of each engine's requests under way: seconds since ``first``, and their number, as steps."""
    found: dict[str, list[tuple[float, int]]] = {}
    for span in spans:
        if span.is_count and span.lane is Lane.ENGINE and span.name == "requests":
            points = found.setdefault(span.worker, [])
            at = (span.start - first) / 1e9
            if points:
                points.append((at, points[-1][1]))
            points.append((at, span.amount or 0))
    return found
