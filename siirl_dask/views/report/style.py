"""The look of a report: colours for light and dark, apart for the colour-blind."""

from __future__ import annotations

from collections.abc import Mapping

from siirl_dask.views.charts import colours, line_chart

_COLOURS = {f"c{number}": colour for number, colour in enumerate(colours.COLOURS)} | {
    "wait": colours.WAIT,
    "transfer": colours.TRANSFER,
    "storage": colours.STORAGE,
}
_LIGHT = {name: colour.light for name, colour in _COLOURS.items()} | {
    "paper": "#fff", "ink": "#1f2328", "dim": "#656d76", "line": "#d9dee3", "faint": "#f4f6f8",
    "good": "#1a7f37", "bad": "#c0362c", "warn": "#9a6700", "other": "#a9c1b4", "tint": "22%",
}  # fmt: skip
_DARK = {name: colour.dark for name, colour in _COLOURS.items()} | {
    "paper": "#101418", "ink": "#dfe5ea", "dim": "#8d99a5", "line": "#2b333b", "faint": "#181e24",
    "good": "#4cc06a", "bad": "#ff7b72", "warn": "#d9a62e", "other": "#4d6a5b", "tint": "30%",
}  # fmt: skip
_PAGE = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0 auto; max-width: 1180px;
  padding: 1.5rem 1.2rem 4rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2.6rem 0 .7rem; padding-top: .6rem;
  border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.8rem 0 .5rem } h4 { font-size: .8rem; margin: .5rem 0 .1rem; color: var(--dim);
  font-weight: 600 }
p { margin: .4rem 0; max-width: 60rem } .note, footer { color: var(--dim); font-size: .9rem }
nav { color: var(--dim); font-size: .9rem } nav a { color: inherit; margin-right: 1rem }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; overflow-wrap: anywhere }
pre { white-space: pre-wrap; margin: 0 }
.runs { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1rem; margin: 1rem 0 }
.run { border: 1px solid var(--line); border-left: 4px solid; border-radius: 6px; padding: .7rem 1rem }
.run h3 { margin: 0; overflow-wrap: anywhere } .run h3, .run dt, .run p, .run dd { color: var(--ink) }
.run dl { margin: .5rem 0 0 } .run dl div { display: flex; justify-content: space-between; gap: 1rem }
.run dt, .run .url { color: var(--dim) } .run dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums }
.run .url { font-size: .8rem; overflow-wrap: anywhere; margin: 0 }
.alone { grid-template-columns: 1fr } .alone dl { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem }
.alone dl div { display: block } .alone dd { text-align: left; font-weight: 600 }
.chip { font-size: .75rem; font-weight: 600; border: 1px solid; border-radius: 1rem; padding: 0 .55rem;
  margin-left: .4rem; white-space: nowrap; vertical-align: 2px }
.complete, .rose { color: var(--good) } .failed, .fell { color: var(--bad) } .interrupted, .open { color: var(--warn) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1rem 1.4rem }
figure { margin: 0 } figcaption { font-size: .85rem; color: var(--dim); display: flex; justify-content: space-between }
.several figcaption { flex-direction: column; line-height: 1.3 } .several b:first-child { margin-left: 0 }
figcaption span { white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
figcaption b { margin-left: .6rem; font-variant-numeric: tabular-nums }
svg { display: block; width: 100%; height: auto }
.scroll { overflow-x: auto } .scroll svg.wide { min-width: 760px }
svg.dag text { font-size: 12px } svg.dag .name { font-weight: 600; font-size: 13px; fill: var(--ink) }
svg.dag rect { stroke: currentColor; stroke-width: 1.4;
  fill: color-mix(in srgb, currentColor var(--tint), var(--paper)) }
svg.dag rect.paper { stroke: none; fill: var(--paper) } svg.dag .edge { stroke: var(--dim); stroke-width: 1.2 }
svg.dag .moved { stroke: var(--ink); stroke-width: 2.4 } svg.dag marker path { fill: var(--ink) }
svg.wide rect { fill: currentColor } svg.wide rect:hover { opacity: .75 }
.key { font-size: .85rem; color: var(--dim) } .key span { margin-right: 1rem; white-space: nowrap }
.key i { display: inline-block; width: .8rem; height: .8rem; background: currentColor; border-radius: 2px;
  margin-right: .35rem; vertical-align: -1px }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th { color: var(--dim); font-weight: 600; text-align: right; vertical-align: bottom }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line) }
td { text-align: right; white-space: nowrap } td.left, td:first-child { white-space: normal }
th:first-child, td:first-child, .left { text-align: left } td code { font-size: 12.5px }
.bar { background: var(--faint); width: 9rem; height: .8rem; display: flex; overflow: hidden; border-radius: 2px }
.bar i { background: currentColor; height: 100% }
article { border: 1px solid var(--line); border-radius: 6px; margin: .8rem 0; padding: .5rem 1rem .7rem }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.5rem }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr } }
.error { border-left: 3px solid var(--bad); padding: .3rem .8rem; background: var(--faint) }
details > summary { cursor: pointer; color: var(--dim); margin: 1rem 0 }
.wait { color: var(--wait) } .transfer { color: var(--transfer) } .storage { color: var(--storage) }
.other { color: var(--other) } .compute { color: var(--c0) } .rest { color: var(--line) }
@media print { body { max-width: none } details > * { display: block } }
""".strip()


def _variables(tones: Mapping[str, str]) -> str:
    return "; ".join(f"--{name}: {tone}" for name, tone in tones.items())


STYLE = "\n".join(
    [
        f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}",
        line_chart.rules("var(--dim)", "var(--line)"),
        _PAGE,
        colours.rules([f"var(--c{number})" for number in range(len(colours.COLOURS))]),
    ]
)
