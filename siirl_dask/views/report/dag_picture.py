"""Draws the DAG that a run recorded, with the seconds and bytes that its trace measured. Nothing
of it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.observe.trace.step_averages import Measured
from siirl_dask.views.charts.colours import COLOURS
from siirl_dask.views.charts.figures import duration, size
from siirl_dask.views.charts.layers import LayeredLayout, Place, Spacing, lay_out
from siirl_dask.views.html_page import safe

_SPACING = Spacing(box=190, high=56, bend=24, apart=50)
_DOWN = 46  # between layers
_MARGIN = 16
_LETTERS = 27  # of a line in a box
_MOST = 200  # nodes
_BY_GROUP = " by group"  # at the end of an edge's name


@dataclass(frozen=True, slots=True)
class Drawable:
    """A DAG as ``dag.json`` describes it, as far as a picture needs it."""

    roles: Sequence[str]
    nodes: Mapping[str, tuple[str, str]]
    """Role and function of each node, in order."""
    edges: Sequence[tuple[str, str]]

    @staticmethod
    def of(dag: Mapping[str, Any], measured: Measured | None) -> Drawable | None:
        """Return the DAG, with edges that the trace knows besides; None where there are no
        nodes, or too many.
        """
        nodes: dict[str, tuple[str, str]] = {}
        edges: dict[tuple[str, str], None] = {}
        for node in dag["nodes"]:
            if not isinstance(node, dict) or "name" not in node:
                continue
            name = str(node["name"])
            after = node.get("after")
            parents = []
            if isinstance(after, list):
                parents = [str(parent) for parent in after]
            edges |= {(parent, name): None for parent in parents if parent in nodes}
            nodes[name] = str(node.get("role")), str(node.get("run")).rpartition(":")[2]
        order = {name: index for index, name in enumerate(nodes)}
        for edge in measured.edges if measured else ():
            source, _, target = edge.removesuffix(_BY_GROUP).partition("->")
            if source in order and target in order and order[source] < order[target]:
                edges[source, target] = None
        roles = [str(role) for role in dag["roles"]]
        if 0 < len(nodes) <= _MOST:
            return Drawable(roles, nodes, list(edges))
        return None


def draw_dag(dag: Drawable, measured: Measured | None) -> str:
    """Return the picture as SVG. Numbers are those of an average step; none where nothing was
    measured.
    """
    layout = lay_out(list(dag.nodes), dag.edges)
    width = max(map(_SPACING.width_of, layout.layers)) + 2 * _MARGIN
    x = _SPACING.middles(layout.layers, width)
    tops = [_top(depth) for depth in range(len(layout.layers))]
    height = _top(len(tops)) - _DOWN + _MARGIN
    lines = []
    labels = []
    for (source, target), path in layout.paths.items():
        names = (f"{source}->{target}", f"{source}->{target}{_BY_GROUP}")
        found = []
        if measured:
            found = [measured.edges[name] for name in names if name in measured.edges]
        received = sum(edge.received for edge in found)
        moved = ""
        if received > 0:
            moved = " moved"
        route = layout.route(path, x, tops, _SPACING.high)
        lines.append(f'<polyline class="edge{moved}" points="{route}" marker-end="url(#tip)"/>')
        if received > 0:
            labels.append(_label(layout, path, x, size(received)))
    boxes = [
        _box(dag, name, x[name], tops[depth], measured)
        for depth, layer in enumerate(layout.layers)
        for name in layer
        if isinstance(name, str)
    ]
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto">'
    )
    return (
        f'<svg class="dag" viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" '
        f'aria-label="the DAG"><defs>{tip}<path d="M0 0L8 4L0 '
        f'8z"/></marker></defs>{"".join([*lines, *boxes, *labels])}</svg>'
    )


def _top(depth: int) -> int:
    return _MARGIN + depth * (_SPACING.high + _DOWN)


def _label(
    layout: LayeredLayout,
    path: Sequence[Place],
    x: Mapping[Place, float],
    text: str,
) -> str:
    middle = (x[path[0]] + x[path[1]]) / 2
    at = _top(layout.depth_of(path[0]) + 1) - _DOWN / 2 + 4
    wide = 6.4 * len(text) + 8
    back = (
        f'<rect class="paper" x="{middle - wide / 2:.0f}" y="{at - 12:.0f}" width="{wide:.0f}" '
        'height="16"/>'
    )
    return f'{back}<text x="{middle:.0f}" y="{at:.0f}" text-anchor="middle">{safe(text)}</text>'


def _box(dag: Drawable, name: str, middle: float, top: int, measured: Measured | None) -> str:
    role, function = dag.nodes[name]
    colour = 0
    if role in dag.roles:
        colour = dag.roles.index(role) % len(COLOURS)
    took = None
    if measured:
        took = measured.nodes.get(name)
    share = ""
    if took and measured and measured.seconds:
        share = f" ({took.seconds / measured.seconds:.0%})"
    lines = [role]
    if took:
        lines.append(f"{duration(took.seconds)}{share}")
    else:
        lines.append("not measured" if measured else function)
    size_of_box = f'width="{_SPACING.box}" height="{_SPACING.high}"'
    rect = (
        f'<rect class="c{colour}" x="{middle - _SPACING.box / 2:.0f}" y="{top}" {size_of_box} '
        'rx="6"/>'
    )
    texts = [
        f'<text class="name" x="{middle:.0f}" y="{top + 18}" '
        f'text-anchor="middle">{safe(name[:_LETTERS])}</text>'
    ]
    texts += [
        f'<text x="{middle:.0f}" y="{top + 33 + 14 * at}" '
        f'text-anchor="middle">{safe(line[:_LETTERS])}</text>'
        for at, line in enumerate(lines)
    ]
    return f"<g><title>{safe(f'{name}: {function}, role {role}')}</title>{rect}{''.join(texts)}</g>"
