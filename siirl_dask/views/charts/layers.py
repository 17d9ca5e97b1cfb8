"""Lays a graph out in layers, parents above their children, and draws its edges past the nodes
between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Bend:
    """Point at which an edge passes a layer."""

    ends: tuple[str, ...]
    layer: int


Place = str | Bend
"""A node's name, or a bend."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """Pixels of a drawing."""

    box: int
    """Width of a node."""
    high: int
    """Height of a node."""
    bend: int
    """Width left to an edge that passes by."""
    apart: int
    """Between neighbours of a layer."""

    def width_of(self, layer: Sequence[Place]) -> int:
        """Return the width of a layer."""
        return sum(map(self._room, layer)) + self.apart * (len(layer) - 1)

    def _room(self, place: Place) -> int:
        if isinstance(place, Bend):
            return self.bend
        return self.box

    def middles(self, layers: Sequence[Sequence[Place]], width: int) -> dict[Place, float]:
        """Return the middle of each place, from the left; every layer is centred in ``width``."""
        found: dict[Place, float] = {}
        for layer in layers:
            left = (width - self.width_of(layer)) / 2
            for place in layer:
                found[place] = left + self._room(place) / 2
                left += self._room(place) + self.apart
        return found


@dataclass(frozen=True, slots=True)
class LayeredLayout:
    """Nodes and bends in layers, parents above their children."""

    layers: tuple[tuple[Place, ...], ...]
    """Places of each layer, from left to right."""
    paths: Mapping[tuple[str, ...], tuple[Place, ...]]
    """Places of each edge, from its source to its target, one in each layer."""

    def depth_of(self, place: Place) -> int:
        """Return the number of the layer in which a place is."""
        return next(depth for depth, layer in enumerate(self.layers) if place in layer)

    def route(
        self,
        path: Sequence[Place],
        middles: Mapping[Place, float],
        tops: Sequence[int],
        high: int,
    ) -> str:
        """Return the points of an edge's polyline: from the bottom of its source to the top of its
        target.

        It goes straight past each layer between. ``tops`` are where the layers begin, ``high`` is a
        node's height.
        """
        first = self.depth_of(path[0])
        points = [(middles[path[0]], tops[first] + high)]
        for depth, place in enumerate(path[1:-1], first + 1):
            points += [(middles[place], tops[depth]), (middles[place], tops[depth] + high)]
        points.append((middles[path[-1]], tops[first + len(path) - 1]))
        return " ".join(f"{across:.0f},{at}" for across, at in points)


def lay_out(nodes: Sequence[str], edges: Iterable[tuple[str, ...]]) -> LayeredLayout:
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
    return LayeredLayout(tuple(map(tuple, layers)), paths)


def _untangle(layers: list[list[Place]], paths: Iterable[Sequence[Place]]) -> None:
    """Sort each layer by the mean position of its neighbours, down and up by turns, so that
    fewer edges cross.
    """
    above: dict[Place, list[Place]] = {place: [] for layer in layers for place in layer}
    below: dict[Place, list[Place]] = {place: [] for layer in layers for place in layer}
    for path in paths:
        for upper, lower in pairwise(path):
            above[lower].append(upper)
            below[upper].append(lower)
    for sweep in range(_SWEEPS):
        if sweep % 2 == 0:  # downwards
            order = range(1, len(layers))
            towards = -1
            neighbours = above
        else:
            order = range(len(layers) - 2, -1, -1)
            towards = 1
            neighbours = below
        for index in order:
            fixed = {place: at for at, place in enumerate(layers[index + towards])}
            here = {place: at for at, place in enumerate(layers[index])}
            layers[index].sort(
                key=lambda place: _mean([fixed[n] for n in neighbours[place]], here[place])
            )


def _mean(values: Sequence[int], otherwise: int) -> float:
    if values:
        return sum(values) / len(values)
    return otherwise
