"""Draws a plan in SVG: nodes coloured by role, moved rows as bold arrows with their columns and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from siirl_dask.planner.chain import Edge, Plan
from siirl_dask.planner.explain.sizes import Estimate, Sizes, estimate
from siirl_dask.planner.explain.tables import readable_bytes, short_name, worker_ranges
from siirl_dask.schema import IDENTITY

_BOX = 220  # a node's width, in px as all lengths here
_HIGH = 58  # a node's height
_BEND = 40  # width left to an edge that passes by
_APART = 60  # between neighbours of a layer, and between layers
_MARGIN = 24
_LINE = 14  # height of a line of text
_LETTER = 6.3  # width of a letter, at 11 px
_LONGEST = 44  # letters of a label
_COLOURS = ("#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#d0e0e3", "#fce5cd", "#ead1dc")
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.title{font:bold 15px sans-serif}.name{font-weight:bold;font-size:12px}"
    ".edge{fill:none;stroke:#999;stroke-width:1.2}.moved{stroke:#333;stroke-width:3}.box{stroke:#555}"
    ".label{fill:#fff;fill-opacity:.9}"
)
_ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="#333"/></marker></defs>'
)


def draw(plans: Mapping[str, tuple[Plan, Sizes]]) -> str:
    """Return an SVG of the DAGs of several phases, one below the other."""
    drawings = [_drawing(phase, plan, sizes) for phase, (plan, sizes) in plans.items()]
    width = max(drawing.width for drawing in drawings)
    top = 0
    parts: list[str] = []
    for drawing in drawings:
        parts.append(f'<g transform="translate(0,{top})">{"".join(drawing.parts)}</g>')
        top += drawing.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">'
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


def _drawing(phase: str, plan: Plan, sizes: Sizes) -> _Drawing:
    estimates = estimate(plan, sizes)
    moving = {edge.ends: edge for edge in plan.edges if edge.moves}
    layout = lay_out(list(plan.stages), estimates)
    labels = {ends: _label(plan, ends, moving.get(ends), size) for ends, size in estimates.items()}
    legend = _legend(plan)
    widest_label = max((label.width for label in labels.values()), default=0)
    width = max(_MARGIN * 2 + max(map(_wide, layout.layers)), widest_label + 48)
    x = _across(layout, width)
    top = _MARGIN + _LINE * (len(plan.dag.roles) + 3)
    parts = [f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 4}">{escape(phase)}</text>', *legend]
    lines: list[str] = []
    texts: list[str] = []
    down: list[int] = []
    for layer in layout.layers:
        down.append(top)
        leaving = [ends for ends in labels if ends[0] in layer]
        top += _HIGH + _APART + sum(labels[ends].height + 4 for ends in leaving)
    for ends, path in layout.paths.items():
        lines.append(_line(path, x, down, layout, moves=ends in moving, label=labels[ends]))
    for index, layer in enumerate(layout.layers[:-1]):
        at = down[index] + _HIGH + _APART // 2
        for ends in sorted((ends for ends in labels if ends[0] in layer), key=lambda ends: x[ends[0]]):
            first, second = layout.paths[ends][:2]
            middle = labels[ends].height // 2
            share = (at + middle - down[index] - _HIGH) / (down[index + 1] - down[index] - _HIGH)
            texts.append(_text(labels[ends], x[first] + share * (x[second] - x[first]), at, width))
            at += labels[ends].height + 4
    boxes = []
    for depth, layer in enumerate(layout.layers):
        for place in layer:
            if isinstance(place, str):
                boxes.append(_box(plan, place, x[place], down[depth]))
    return _Drawing(width, top - _APART + _MARGIN, [*parts, *lines, *boxes, *texts])


def _wide(layer: Sequence[Place]) -> int:
    return sum(_BOX if isinstance(place, str) else _BEND for place in layer) + _APART * (len(layer) - 1)


def _across(layout: Layout, width: int) -> dict[Place, float]:
    """Return the middle of each place; every layer is centred."""
    middles: dict[Place, float] = {}
    for layer in layout.layers:
        left = (width - _wide(layer)) / 2
        for place in layer:
            room = _BOX if isinstance(place, str) else _BEND
            middles[place] = left + room / 2
            left += room + _APART
    return middles


def _legend(plan: Plan) -> list[str]:
    workers = tuple(plan.chains)
    parts: list[str] = []
    for index, role in enumerate(plan.dag.roles):
        y = _MARGIN + _LINE * (index + 1) + 2
        text = f"{role.name}: {short_name(role.build)} on {worker_ranges(plan.placement[role.name], workers)}"
        parts.append(f'<circle cx="{_MARGIN + 5}" cy="{y + 6}" r="5" fill="{_colour(plan, role.name)}" stroke="#555"/>')
        parts.append(f'<text x="{_MARGIN + 16}" y="{y + 10}">{escape(text)}</text>')
    return parts


def _colour(plan: Plan, role: str) -> str:
    return _COLOURS[[role.name for role in plan.dag.roles].index(role) % len(_COLOURS)]


def _label(plan: Plan, ends: tuple[str, ...], edge: Edge | None, size: Estimate) -> _Label:
    source, target = ends[:2]
    suppliers = plan.stages[target].sources
    names = edge.schema.names if edge else [name for name, supplier in suppliers.items() if supplier == source]
    marked = [f"{name}?" if name in size.unknown else name for name in names if name not in IDENTITY]
    columns = ", ".join(marked) if marked else "row ids only"
    if edge is None:
        return _Label((_cut(columns),), f"{source} to {target}, rows stay: {columns}")
    what = "groups" if edge.by_group else "rows"
    rows = f"? {what}" if size.rows is None else f"{size.rows} {what}"
    policy = f"{edge.rows}{' by minibatch' if edge.by_minibatch else ''}"
    policy += " in parts" if plan.streams.get(source) == target else ""
    amount = "? bytes" if size.bytes is None else f"at most {readable_bytes(size.bytes)}"
    moved = f"{rows} {policy}, {amount}{' and ?' if size.unknown and size.bytes else ''}"
    return _Label((_cut(columns), _cut(moved)), f"{source} to {target}, {moved}: {columns}")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"


def _line(
    path: Sequence[Place], x: Mapping[Place, float], down: Sequence[int], layout: Layout, *, moves: bool, label: _Label
) -> str:
    """Draw an edge from the bottom of its source through its bends, straight past each layer, to its target's top."""
    first = next(depth for depth, layer in enumerate(layout.layers) if path[0] in layer)
    points = [(x[path[0]], down[first] + _HIGH)]
    for depth, place in enumerate(path[1:-1], first + 1):
        points += [(x[place], down[depth]), (x[place], down[depth] + _HIGH)]
    points.append((x[path[-1]], down[first + len(path) - 1]))
    route = " ".join(f"{across:.0f},{at}" for across, at in points)
    style = "edge moved" if moves else "edge"
    title = f"<title>{escape(label.full)}</title>"
    return f'<polyline class="{style}" points="{route}" marker-end="url(#tip)">{title}</polyline>'


def _text(label: _Label, middle: float, top: int, width: int) -> str:
    left = min(max(middle - label.width / 2, 4), width - label.width - 4)
    back = f'<rect class="label" x="{left:.0f}" y="{top}" width="{label.width}" height="{label.height}"/>'
    return back + _lines(label.lines, left + label.width / 2, top + _LINE - 2)


def _lines(lines: Iterable[str], middle: float, first: float) -> str:
    return "".join(
        f'<text x="{middle:.0f}" y="{first + at * _LINE:.0f}" text-anchor="middle">{escape(line)}</text>'
        for at, line in enumerate(lines)
    )


def _box(plan: Plan, name: str, middle: float, top: int) -> str:
    node = plan.stages[name].node
    left = middle - _BOX / 2
    colour = _colour(plan, node.role)
    saved = ""
    if node.save_as:
        saved = f", saves {node.save_as}"
    elif node.stage:
        saved = ", stage"
    letters = int(_BOX / _LETTER)
    function = short_name(node.fn)
    shown = function if len(function) <= letters else f"… {function.rpartition('.')[2]}"[:letters]
    return (
        f'<rect class="box" x="{left:.0f}" y="{top}" width="{_BOX}" height="{_HIGH}" rx="6" fill="{colour}"/>'
        f'<text class="name" x="{middle:.0f}" y="{top + 18}" text-anchor="middle">{escape(name)}</text>'
        + _lines([shown, f"{node.role}{saved}"[:letters]], middle, top + 18 + _LINE)
    )


_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Bend:
    """Point at which an edge passes a layer."""

    ends: tuple[str, ...]
    layer: int


Place = str | Bend
"""A node's name, or a bend."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes and bends in layers, parents above their children."""

    layers: tuple[tuple[Place, ...], ...]
    """Places of each layer, from left to right."""
    paths: Mapping[tuple[str, ...], tuple[Place, ...]]
    """Places of each edge, from its source to its target, one in each layer."""


def lay_out(nodes: Sequence[str], edges: Iterable[tuple[str, ...]]) -> Layout:
    """Lay out ``nodes``, which come parents first. An edge begins with its source and target."""
    edges = list(edges)
    depth = dict.fromkeys(nodes, 0)
    for node in nodes:
        depth[node] = max((depth[ends[0]] + 1 for ends in edges if ends[1] == node), default=0)
    layers: list[list[Place]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in nodes:
        layers[depth[node]].append(node)
    paths: dict[tuple[str, ...], tuple[Place, ...]] = {}
    for ends in edges:
        source, target = ends[:2]
        bends = [Bend(ends, layer) for layer in range(depth[source] + 1, depth[target])]
        paths[ends] = (source, *bends, target)
        for bend in bends:
            layers[bend.layer].append(bend)
    _untangle(layers, paths.values())
    return Layout(tuple(map(tuple, layers)), paths)


def _untangle(layers: list[list[Place]], paths: Iterable[Sequence[Place]]) -> None:
    """Sort each layer by the mean position of its neighbours, down and up by turns, so that fewer edges cross."""
    above: dict[Place, list[Place]] = {place: [] for layer in layers for place in layer}
    below: dict[Place, list[Place]] = {place: [] for layer in layers for place in layer}
    for path in paths:
        for upper, lower in pairwise(path):
            above[lower].append(upper)
            below[upper].append(lower)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        order = range(1, len(layers)) if downwards else range(len(layers) - 2, -1, -1)
        for index in order:
            fixed = {place: at for at, place in enumerate(layers[index - 1 if downwards else index + 1])}
            neighbours = above if downwards else below
            here = {place: at for at, place in enumerate(layers[index])}
            layers[index].sort(key=lambda place: _mean([fixed[n] for n in neighbours[place]], here[place]))


def _mean(values: Sequence[int], otherwise: int) -> float:
    return sum(values) / len(values) if values else otherwise
