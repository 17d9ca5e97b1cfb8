"""The page's looks: colours that serve in light and dark, its style sheets, its template, and
figures in one style.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from bokeh.models import CustomJS, HoverTool, LayoutDOM, Row
from bokeh.models.annotations import Title
from bokeh.models.widgets import DataTable, Div
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

_HEAD = """
<style>
:root { --page:#f6f7f9; --card:#ffffff; --ink:#1c2329; --soft:#5f6b76; --line:#d8dde3; --hover:#eef2f7; --mark:#fff3d6;
  --accent:#1f6fb5; --bad:#b3261e; --good:#1a7f4b; color-scheme:light; }
html[data-theme=dark] { --page:#0f1317; --card:#171c22; --ink:#e4e9ee; --soft:#9aa7b3; --line:#2c343d; --hover:#202831;
  --mark:#3a3115; --accent:#6db3f2; --bad:#ff8a80; --good:#5fcf95; color-scheme:dark; }
html, body { background:var(--page); color:var(--ink); }
body { font-family:system-ui, sans-serif; }
.navbar ul { background:var(--card) !important; border-bottom:1px solid var(--line); }
.navbar li a { color:var(--ink) !important; }
.siirl-card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:8px 12px 10px;
  margin:0 auto 12px; max-width:2600px; box-sizing:border-box; }
.siirl-card h2 { font-size:14px; margin:2px 0 6px; color:var(--soft); font-weight:600; letter-spacing:.02em; }
.siirl-bar { display:flex; flex-wrap:wrap; justify-content:space-between; align-items:end; gap:0 12px; }
#siirl-farewell { border-color:var(--bad); border-width:2px; line-height:1.7; font-size:14px; }
#siirl-farewell code { background:var(--page); padding:2px 6px; border-radius:4px; overflow-wrap:anywhere; }
</style>
<script>
(function () {
  let chosen = null;
  try { chosen = localStorage.getItem("siirl-theme"); } catch (error) {}
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
</script>
"""
_CARDS = """
<div class="siirl-card" id="siirl-farewell" hidden></div>
<div class="siirl-card">{{ embed(roots.top) }}</div>
<div class="siirl-card"><div class="siirl-bar"><h2>Curves</h2>{{ embed(roots.controls) }}</div>
{{ embed(roots.curves) }}</div>
<div class="siirl-card"><h2>Samples</h2>{{ embed(roots.samples) }}</div>
<div class="siirl-card"><h2>Timeline</h2>{{ embed(roots.timeline) }}</div>
<div class="siirl-card"><h2>Workers</h2>{{ embed(roots.workers) }}</div>
<div hidden>{{ embed(roots.farewell) }}</div>
{{ plot_script }}
"""
TEMPLATE = f"""
{{% extends "base.html" %}}
{{% from macros import embed %}}
{{% block extra_resources %}}{_HEAD}<style>body {{ padding:3.2rem 14px 1rem; }}</style>{{% endblock %}}
{{% block content %}}{_CARDS}{{% endblock %}}
"""
"""The page on Dask's dashboard, with its menu; Jinja reads it."""
SERVED_TEMPLATE = f"""
{{% from macros import embed %}}
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{{{ title }}}}</title>
{{{{ bokeh_css }}}}{{{{ bokeh_js }}}}
{_HEAD}<style>body {{ margin:0; padding:10px 14px 1rem; }} 
nav {{ margin:0 4px 6px; font-size:13px; }} nav a {{ color:var(--accent); }}</style>
</head><body>
{{% if index %}}<nav><a href="{{{{ index }}}}">all runs</a></nav>{{% endif %}}
{_CARDS}
</body></html>
"""
"""The page where no scheduler serves it; Jinja reads it."""

TEXTS = """
:host { color: var(--ink); font-size: 13px; }
.bk-clearfix { color: inherit; width: 100%; }
.whole { display: grid; width: 100%; gap: 4px 12px;
  grid-template-columns: minmax(0, 3fr) minmax(0, 5fr) minmax(0, 2fr); }
.soft { color: var(--soft); } .bad { color: var(--bad); } .good { color: var(--good); }
.big { font-size: 15px; font-weight: 600; }
.chip { border-radius: 9px; padding: 1px 9px; font-size: 12px; border: 1px solid currentColor; margin: 0 6px; }
.chip.live { color: var(--accent); } .chip.complete { color: var(--good); }
.chip.failed, .chip.lost { color: var(--bad); }
.chip.interrupted { color: var(--bad); }
.asks { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 290px), 1fr)); gap: 4px 22px; }
.ask { min-width: 0; } .ask h3 { font-size: 12px; font-weight: 600; color: var(--soft); margin: 8px 0 0; }
.ask p { overflow-wrap: anywhere; } .spark { color: var(--accent); line-height: 1; }
.bar { height: 6px; border-radius: 3px; background: var(--line); margin: 5px 0; }
.bar i { display: block; height: 100%; border-radius: 3px; background: var(--accent); }
code { background: var(--page); padding: 1px 5px; border-radius: 4px; overflow-wrap: anywhere; }
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


_WALK = """
const each = (root, found) => {
  for (const one of root.querySelectorAll("*")) {
    if (one.matches(".chip")) found(one);
    if (one.shadowRoot) each(one.shadowRoot, found);
  }
};
"""
_LOST = """
// on a later try to connect the box is there already
const box = document.getElementById("siirl-farewell");
box.innerHTML = farewell.text;
box.hidden = false;
each(document, (chip) => {
  if (!chip.matches(".live")) return;
  chip.className = "chip lost was-live";
  chip.textContent = "connection lost";
});
"""
_BACK = """
document.getElementById("siirl-farewell").hidden = true;
each(document, (chip) => {
  if (!chip.matches(".was-live")) return;
  chip.className = "chip live";
  chip.textContent = "training";
});
"""
_QUIET = """
// the box says it, and what to type
for (const one of Bokeh.documents) if (one.config) one.config.notify_connection_status = false;
"""


def echo(sent: Div, got: Div) -> CustomJS:
    """Return what has the browser send the tags of ``sent`` back as those of ``got``."""
    return CustomJS(args={"sent": sent, "got": got}, code="got.tags = sent.tags")


def farewells(farewell: Div) -> tuple[CustomJS, CustomJS]:
    """Return what shows the text of ``farewell`` when the connection is lost, and what takes it
    away when it is back.
    """
    arguments = {"farewell": farewell}
    lost = CustomJS(args=arguments, code=_QUIET + _WALK + _LOST)
    return lost, CustomJS(args=arguments, code=_WALK + _BACK)


def grid(children: Sequence[LayoutDOM], *, least: int) -> Row:
    """Return the children side by side, as many as have ``least`` pixels each; the others below."""
    columns = f"repeat(auto-fit, minmax(min(100%, {least}px), 1fr))"
    styles: dict[str, str | None] = {
        "display": "grid",
        "grid-template-columns": columns,
        "gap": "0 10px",
    }
    return Row(children=list(children), sizing_mode="stretch_width", styles=styles)


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


def hover_over(fig: figure, renderers: Sequence[Any]) -> None:
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
    number = zlib.crc32(node.encode())
    if node in nodes:
        number = nodes.index(node)
    return _NODES[number % len(_NODES)]
