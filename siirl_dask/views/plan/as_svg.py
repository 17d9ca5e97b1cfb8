"""Draws a plan in SVG: nodes coloured by role, moved rows as bold arrows with their columns and
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from siirl_dask.planner import Edge, Estimate, Plan, TableSizes, estimate, short_name
from siirl_dask.schema import IDENTITY
from siirl_dask.views.charts.colours import COLOURS, tint
from siirl_dask.views.charts.layers import Spacing, lay_out
from siirl_dask.views.html_page import safe
from siirl_dask.wording import readable_bytes, worker_ranges

_DOWN = 60  # between layers, in px as all lengths here
_SPACING = Spacing(box=220, high=58, bend=40, apart=60)
_MARGIN = 24
_LINE = 14  # height of a line of text
_LETTER = 6.3  # width of a letter, at 11 px
_LONGEST = 44  # letters of a label
_TINTS = [tint(colour.light, 0.22) for colour in COLOURS]
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.title{font:bold 15px "
    "sans-serif}.name{font-weight:bold;font-size:12px}"
    ".edge{fill:none;stroke:#999;stroke-width:1.2}.moved{stroke:#333;stroke-width:3}.box{stroke:#555}"
    ".label{fill:#fff;fill-opacity:.9}"
)
_ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" '
    'fill="#333"/></marker></defs>'
)


def draw(plans: Mapping[str, tuple[Plan, TableSizes]]) -> str:
    """Return an SVG of the DAGs of several phases, one below the other."""
    drawings = [_drawing(phase, plan, sizes) for phase, (plan, sizes) in plans.items()]
    width = max(drawing.width for drawing in drawings)
    top = 0
    parts: list[str] = []
    for drawing in drawings:
        parts.append(f'<g transform="translate(0,{top})">{"".join(drawing.parts)}</g>')
        top += drawing.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 '
        f'{width} {top}">'
    )
    back = f'<rect class="paper" width="{width}" height="{top}" fill="#fff"/>'
    return f"{head}<style>{_STYLE}</style>{_ARROW}{back}{''.join(parts)}</svg>\n"


@dataclass(frozen=True, slots=True)
class _Drawing:
    width: int
    height: int
    parts: list[str]


@dataclass(frozen=True, slots=True)
class _Label:
    lines: tuple[str, ...]
    full: str

    @property
    def width(self) -> int:
        return int(max(map(len, self.lines)) * _LETTER) + 8

    @property
    def height(self) -> int:
        return len(self.lines) * _LINE + 4


def _drawing(phase: str, plan: Plan, sizes: TableSizes) -> _Drawing:
    estimates = estimate(plan, sizes)
    moving = {edge.ends: edge for edge in plan.edges if edge.moves}
    layout = lay_out(list(plan.flow), estimates)
    labels = {ends: _label(plan, ends, moving.get(ends), size) for ends, size in estimates.items()}
    legend = _legend(plan)
    widest_label = max((label.width for label in labels.values()), default=0)
    width = max(_MARGIN * 2 + max(map(_SPACING.width_of, layout.layers)), widest_label + 48)
    x = _SPACING.middles(layout.layers, width)
    top = _MARGIN + _LINE * (len(plan.dag.roles) + 3)
    parts = [f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 4}">{safe(phase)}</text>', *legend]
    lines: list[str] = []
    texts: list[str] = []
    down: list[int] = []
    for layer in layout.layers:
        down.append(top)
        leaving = [ends for ends in labels if ends[0] in layer]
        top += _SPACING.high + _DOWN + sum(labels[ends].height + 4 for ends in leaving)
    for ends, path in layout.paths.items():
        route = layout.route(path, x, down, _SPACING.high)
        style = "edge"
        if ends in moving:
            style = "edge moved"
        title = f"<title>{safe(labels[ends].full)}</title>"
        lines.append(
            f'<polyline class="{style}" points="{route}" marker-end="url(#tip)">{title}</polyline>'
        )
    for index, layer in enumerate(layout.layers[:-1]):
        at = down[index] + _SPACING.high + _DOWN // 2
        for ends in sorted(
            (ends for ends in labels if ends[0] in layer), key=lambda ends: x[ends[0]]
        ):
            first, second = layout.paths[ends][:2]
            middle = labels[ends].height // 2
            bottom = down[index] + _SPACING.high
            share = (at + middle - bottom) / (down[index + 1] - bottom)
            texts.append(_text(labels[ends], x[first] + share * (x[second] - x[first]), at, width))
            at += labels[ends].height + 4
    boxes = []
    for depth, layer in enumerate(layout.layers):
        for place in layer:
            if isinstance(place, str):
                boxes.append(_box(plan, place, x[place], down[depth]))
    return _Drawing(width, top - _DOWN + _MARGIN, [*parts, *lines, *boxes, *texts])


def _legend(plan: Plan) -> list[str]:
    workers = tuple(plan.chains)
    parts: list[str] = []
    for index, role in enumerate(plan.dag.roles):
        y = _MARGIN + _LINE * (index + 1) + 2
        text = (
            f"{role.name}: {short_name(role.build)} on "
            f"{worker_ranges(plan.placement[role.name], workers)}"
        )
        parts.append(
            f'<circle cx="{_MARGIN + 5}" cy="{y + 6}" r="5" fill="{_colour(plan, role.name)}" '
            'stroke="#555"/>'
        )
        parts.append(f'<text x="{_MARGIN + 16}" y="{y + 10}">{safe(text)}</text>')
    return parts


def _colour(plan: Plan, role: str) -> str:
    return _TINTS[[role.name for role in plan.dag.roles].index(role) % len(_TINTS)]


def _label(plan: Plan, ends: tuple[str, ...], edge: Edge | None, size: Estimate) -> _Label:
    source, target = ends[:2]
    suppliers = plan.flow[target].sources
    names = [name for name, supplier in suppliers.items() if supplier == source]
    if edge:
        names = edge.schema.names
    marked = [
        f"{name}?" if name in size.unknown else name for name in names if name not in IDENTITY
    ]
    columns = "row ids only"
    if marked:
        columns = ", ".join(marked)
    if edge is None:
        return _Label((_cut(columns),), f"{source} to {target}, rows stay: {columns}")
    what = "rows"
    if edge.by_group:
        what = "groups"
    rows = f"? {what}"
    if size.rows is not None:
        rows = f"{size.rows} {what}"
    policy = str(edge.rows)
    if edge.by_minibatch:
        policy += " by minibatch"
    if plan.streams.get(source) == target:
        policy += " in parts"
    amount = "? bytes"
    if size.bytes is not None:
        amount = f"at most {readable_bytes(size.bytes)}"
    if size.unknown and size.bytes:
        amount += " and ?"
    moved = f"{rows} {policy}, {amount}"
    return _Label((_cut(columns), _cut(moved)), f"{source} to {target}, {moved}: {columns}")


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 2]} …"


def _text(label: _Label, middle: float, top: int, width: int) -> str:
    left = min(max(middle - label.width / 2, 4), width - label.width - 4)
    back = (
        f'<rect class="label" x="{left:.0f}" y="{top}" width="{label.width}" '
        f'height="{label.height}"/>'
    )
    return back + _lines(label.lines, left + label.width / 2, top + _LINE - 2)


def _lines(lines: Iterable[str], middle: float, first: float) -> str:
    return "".join(
        f'<text x="{middle:.0f}" y="{first + at * _LINE:.0f}" '
        f'text-anchor="middle">{safe(line)}</text>'
        for at, line in enumerate(lines)
    )


def _box(plan: Plan, name: str, middle: float, top: int) -> str:
    node = plan.flow[name].node
    left = middle - _SPACING.box / 2
    colour = _colour(plan, node.role)
    saved = ""
    if node.save_as:
        saved = f", saves {node.save_as}"
    elif node.stage:
        saved = ", stage"
    letters = int(_SPACING.box / _LETTER)
    function = short_name(node.fn)
    shown = function
    if len(function) > letters:
        shown = f"… {function.rpartition('.')[2]}"[:letters]
    return (
        f'<rect class="box" x="{left:.0f}" y="{top}" width="{_SPACING.box}" '
        f'height="{_SPACING.high}" rx="6" fill="{colour}"/><text class="name" x="{middle:.0f}" '
        f'y="{top + 18}" text-anchor="middle">{safe(name)}</text>'
        + _lines([shown, f"{node.role}{saved}"[:letters]], middle, top + 18 + _LINE)
    )
