"""The page's looks: colours that serve in light and dark, its style sheets, its template, and
figures in one style.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from bokeh.models import CustomJS, HoverTool
from bokeh.models.annotations import Title
from bokeh.models.widgets import DataTable
from bokeh.plotting import figure

from siirl_dask.views.charts import colours

LINES = tuple(colour.either for colour in colours.COLOURS)
"""Colours of lines: a plot does not know whether the page is light or dark."""
_NODES = (*LINES, "#8fb339", "#b07a4f")
TRANSFER = colours.TRANSFER.either
STORAGE = colours.STORAGE.either
WAIT = colours.WAIT.either
OWN = "#5d6670"
CRITICAL = "#e5484d"
# Readable on both backgrounds, until the page has found out which it is.
_INK = "#7b858f"
_GRID = "#8b95a0"

TEMPLATE = """
{% extends "base.html" %}
{% from macros import embed %}
{% block extra_resources %}
<style>
:root { --page:#f6f7f9; --card:#ffffff; --ink:#1c2329; --soft:#5f6b76; --line:#d8dde3; --hover:#eef2f7; --mark:#fff3d6;
  --accent:#1f6fb5; --bad:#b3261e; color-scheme:light; }
html[data-theme=dark] { --page:#0f1317; --card:#171c22; --ink:#e4e9ee; --soft:#9aa7b3; --line:#2c343d; --hover:#202831;
  --mark:#3a3115; --accent:#6db3f2; --bad:#ff8a80; color-scheme:dark; }
html, body { background:var(--page); color:var(--ink); }
body { padding:3.2rem 14px 1rem; }
.navbar ul { background:var(--card) !important; border-bottom:1px solid var(--line); }
.navbar li a { color:var(--ink) !important; }
.siirl-card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:8px 12px 10px;
  margin:0 auto 12px; max-width:1900px; }
.siirl-card > h2 { font-size:14px; margin:2px 0 6px; color:var(--soft); font-weight:600; letter-spacing:.02em; }
</style>
<script>
(function () {
  let chosen = null;
  try { chosen = localStorage.getItem("siirl-theme"); } catch (error) {}
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
</script>
{% endblock %}
{% block content %}
<div class="siirl-card">{{ embed(roots.top) }}</div>
<div class="siirl-card"><h2>Curves</h2>{{ embed(roots.curves) }}</div>
<div class="siirl-card"><h2>Timeline</h2>{{ embed(roots.timeline) }}</div>
<div class="siirl-card"><h2>Samples</h2>{{ embed(roots.samples) }}</div>
<div class="siirl-card"><h2>Workers</h2>{{ embed(roots.workers) }}</div>
{{ plot_script }}
{% endblock %}
"""

TEXTS = """
:host { color: var(--ink); font-size: 13px; }
.bk-clearfix { color: inherit; width: 100%; }
.whole { display: grid; width: 100%; gap: 4px 12px;
  grid-template-columns: minmax(0, 3fr) minmax(0, 5fr) minmax(0, 2fr); }
.soft { color: var(--soft); } .bad { color: var(--bad); } .big { font-size: 15px; font-weight: 600; }
.key { display:inline-block; width:11px; height:11px; border-radius:2px; margin:0 4px 0 10px; vertical-align:-1px; }
.said { border-left: 3px solid var(--line); padding-left: 8px; margin: 4px 0; }
img { max-width: 256px; border: 1px solid var(--line); border-radius: 4px; } p { margin: 3px 0; }
table.parts { border-collapse: collapse; } table.parts td { padding: 1px 14px 1px 0; vertical-align: top; }
pre.siirl-text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; padding: 6px 9px; margin: 3px 0 9px; max-height: 420px; overflow-y: auto;
  font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
"""
WIDGETS = """
:host { color: var(--ink); font-size: 13px; }
.bk-input, .choices__inner, .choices__input, select { background-color: var(--card) !important; color: var(--ink);
  border-color: var(--line) !important; }
.choices__list--dropdown, .choices__list[aria-expanded] { color: var(--ink);
  background: var(--card) !important; }
.choices__list--multiple .choices__item { background: var(--accent) !important;
  border-color: var(--accent) !important; }
label, .bk-input-group label { color: var(--soft); }
.bk-btn { background: var(--card) !important; color: var(--ink) !important; border-color: var(--line) !important; }
.bk-btn.bk-active { background: var(--hover) !important; color: var(--accent) !important; font-weight: 600;
  border-color: var(--accent) !important; }
"""
TABLE = """
.bk-data-table, .slick-viewport, .grid-canvas { background: var(--card) !important; color: var(--ink); z-index: 0; }
.slick-header, .slick-header-columns, .slick-header-column { background: var(--page) !important;
  color: var(--soft) !important; border-color: var(--line) !important; }
.slick-row, .slick-row.odd, .slick-row.even { background: var(--card) !important; cursor: pointer; }
.slick-row:hover { background: var(--hover) !important; }
.slick-cell { color: var(--ink); border-color: var(--line) !important; background: transparent !important; }
.slick-cell.selected { background: var(--mark) !important; }
"""

_RECOLOUR = """
const dark = document.documentElement.dataset.theme === "dark";
const [ink, grid] = dark ? ["#b9c4ce", "#4a5560"] : ["#4a545e", "#c9d0d7"];
for (const plot of plots) {
  for (const axis of [...plot.below, ...plot.left]) {
    axis.major_label_text_color = ink;
    axis.axis_label_text_color = ink;
    axis.axis_line_color = grid;
  }
  if (plot.title) plot.title.text_color = ink;
  for (const part of plot.center) if ("grid_line_color" in part) part.grid_line_color = grid;
}
button.label = dark ? "light" : "dark";
"""
_SWITCH = """
const root = document.documentElement;
root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
try { localStorage.setItem("siirl-theme", root.dataset.theme); } catch (error) {}
"""


def themes(plots: Sequence[figure], button: Any) -> tuple[CustomJS, CustomJS]:
    """Return what gives all plots the colours of the page's theme, and what goes to the other
    theme first.
    """
    arguments = {"plots": list(plots), "button": button}
    return CustomJS(args=arguments, code=_RECOLOUR), CustomJS(
        args=arguments, code=_SWITCH + _RECOLOUR
    )


def plot(title: str = "", tooltips: Sequence[tuple[str, str]] = (), **options: Any) -> figure:
    """Return an empty figure without a toolbar's clutter; ``tooltips`` belong to renderers named
    ``hover``.
    """
    usual = {
        "height": 190,
        "sizing_mode": "stretch_width",
        "min_width": 200,
        "tools": "",
        "toolbar_location": None,
    }
    settings: dict[str, Any] = {**usual, **options}
    head = Title(text=title, text_font_size="12px", text_font_style="normal", text_color=_INK)
    fig = figure(title=head, **settings)
    fig.background_fill_alpha = fig.border_fill_alpha = 0
    fig.outline_line_color = None
    fig.min_border_left = 44
    fig.min_border_right = 10
    fig.min_border_top = 4
    for axis in (*fig.xaxis, *fig.yaxis):
        axis.major_label_text_color = axis.axis_label_text_color = _INK
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "11px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = _GRID
        if hasattr(axis.formatter, "power_limit_low"):
            axis.formatter.power_limit_low = -4
        axis.major_tick_line_color = axis.minor_tick_line_color = None
    fig.grid.grid_line_color = _GRID
    fig.grid.grid_line_alpha = 0.35
    if tooltips:
        fig.add_tools(HoverTool(tooltips=list(tooltips), mode="mouse", renderers=[]))
    return fig


def hover_over(fig: figure, *renderers: Any) -> None:
    """Have the figure's tooltips tell of these renderers."""
    for tool in fig.tools:
        if isinstance(tool, HoverTool):
            tool.renderers = list(renderers)


def redraw_rows(table: DataTable) -> None:
    """Have a table draw its rows again when others come: by itself it does so only when their
    number changes.
    """
    table.source.js_on_change(
        "data", CustomJS(args={"view": table.view}, code="view.change.emit()")
    )


def colour_of(node: str, nodes: Sequence[str]) -> str:
    """Return a node's colour: by its place among ``nodes``, or for another one by its name."""
    number = nodes.index(node) if node in nodes else zlib.crc32(node.encode())
    return _NODES[number % len(_NODES)]
