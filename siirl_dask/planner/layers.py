"""Where to draw the nodes of a DAG: in layers, parents above, with few crossings.

The usual way (Sugiyama, Tagawa, Toda 1981): longest path for the layers, a bend in every layer that an edge passes,
and each layer ordered by the mean place of its neighbours, down and up in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Bend:
    """Where an edge passes a layer."""

    source: str
    target: str
    layer: int


Place = str | Bend
"""A node, by name, or a bend."""


@dataclass(frozen=True, slots=True)
class Layout:
    layers: tuple[tuple[Place, ...], ...]
    """From left to right."""
    paths: Mapping[tuple[str, str], tuple[Place, ...]]
    """Of each edge, from its source to its target, one place a layer."""


def lay_out(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> Layout:
    """``nodes`` come parents first."""
    edges = list(edges)
    depth = dict.fromkeys(nodes, 0)
    for node in nodes:
        depth[node] = max((depth[source] + 1 for source, target in edges if target == node), default=0)
    layers: list[list[Place]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in nodes:
        layers[depth[node]].append(node)
    paths: dict[tuple[str, str], tuple[Place, ...]] = {}
    for source, target in edges:
        bends = [Bend(source, target, layer) for layer in range(depth[source] + 1, depth[target])]
        paths[source, target] = (source, *bends, target)
        for bend in bends:
            layers[bend.layer].append(bend)
    _untangle(layers, paths.values())
    return Layout(tuple(map(tuple, layers)), paths)


def _untangle(layers: list[list[Place]], paths: Iterable[Sequence[Place]]) -> None:
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
