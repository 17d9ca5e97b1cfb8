"""Merges the nodes of one layer after the other: a list replaces all nodes, a mapping by name
changes single ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl_dask.config.file.layers import Layer
from siirl_dask.errors import ConfigError, did_you_mean

_DEPTH = 2  # a node's keys, and the options under its ``with``, are merged one by one


@dataclass(frozen=True, slots=True)
class NodeList:
    """The specs of a DAG's nodes, each with its place."""

    items: Any
    """Specs of the nodes; a text if the whole list is an interpolation, or another value by
    mistake."""
    places: list[str]
    """File and line of each spec, and of the specs that it changes; one place for all if
    ``items`` is no list."""

    def places_of(self, resolved: Any) -> list[str]:
        """Return the place of each spec in ``resolved``, which ``items`` became."""
        if isinstance(self.items, list):
            return self.places
        if isinstance(resolved, list):
            return self.places * len(resolved)
        return []


def merged_nodes(old: NodeList, layer: Layer, key: str) -> NodeList:
    """Return the nodes so far with the changes of ``layer``. ConfigError for a change of a node
    that is not there.
    """
    part = layer.values[key]
    if isinstance(part, list):
        return NodeList(part, [layer.place(key, at) for at in range(len(part))])
    if not isinstance(part, Mapping):
        return NodeList(part, [layer.place(key, None)])
    if not isinstance(old.items, list):
        raise ConfigError(
            f"{layer.place(key, None)}: {key} gives nodes by name, and the base's are "
            f"{old.items!r}: expected a list there, or write one here"
        )
    named: dict[Any, tuple[Any, str]] = {}
    for position, (item, place) in enumerate(zip(old.items, old.places, strict=True)):
        named[item.get("name", position) if isinstance(item, Mapping) else position] = (item, place)
    for name, change in part.items():
        _change(named, str(name), change, layer, layer.place(key, str(name)))
    return NodeList([item for item, _ in named.values()], [place for _, place in named.values()])


def _change(
    named: dict[Any, tuple[Any, str]],
    name: str,
    change: Any,
    layer: Layer,
    at: str,
) -> None:
    """Change, add or remove one node."""
    known = [str(other) for other in named]
    missing = f"{at}: node {name!r} is none of those before it (nodes: {known})"
    hint = did_you_mean(name, known)
    if change is None:
        if name not in named:
            raise ConfigError(f"{missing}: there is nothing to remove{hint}")
        del named[name]
        return
    if not isinstance(change, Mapping):
        raise ConfigError(
            f"{at}: node {name!r} is {change!r}: expected a mapping of what to change, or null to "
            "remove it"
        )
    if (
        name not in named
        and "repeat" not in change
        and (lacking := [key for key in ("run", "role") if key not in change])
    ):
        raise ConfigError(f"{missing}: a new node needs {' and '.join(lacking)}{hint}")
    if change.get("name", name) != name:
        raise ConfigError(
            f"{at}: node {name!r} has name={change['name']!r}: expected the name it is written "
            "under"
        )
    if name in named:
        old, before = named[name]
        depth = max(_DEPTH, layer.depth - 2)  # a longer key of an override goes deeper
        named[name] = (_over(old, change, depth), f"{at}, over {before}")
    else:
        named[name] = ({"name": name, **change}, at)


def _over(old: Any, new: Any, depth: int) -> Any:
    """Return ``new`` merged over ``old``, key by key down to ``depth``; null removes a key that
    was there.
    """
    if not depth or not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    merged = {**old, **{key: _over(old.get(key), value, depth - 1) for key, value in new.items()}}
    return {
        key: value
        for key, value in merged.items()
        if value is not None or key not in new or key not in old
    }
