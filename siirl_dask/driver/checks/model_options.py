"""Changes the options that describe models, wherever a configuration or the roles and nodes of a
DAG have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from siirl_dask.planner import DAG, Node, Role, bare, options_of

Change = Callable[[Any], Any]
"""Returns another group of options in place of one, a dataclass, or the group itself."""
_T = TypeVar("_T")


def with_models(value: _T, change: Change) -> _T:
    """Return ``value`` with ``change`` applied to each dataclass in it, outer ones last; itself
    if none changes.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
        changes = _changed(fields, change)
        whole: _T = change(dataclasses.replace(value, **changes) if changes else value)
        return whole
    if isinstance(value, Mapping):
        changes = _changed(value, change)
        return {**value, **changes} if changes else value  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        items: Any = [with_models(item, change) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        if changed:
            return type(value)(items)
        return value
    return value


def with_models_in_dag(dag: DAG, change: Change) -> DAG:
    """Return the DAG with changed options of its roles and nodes, as ``with_models``; itself if
    none changes.
    """
    roles = tuple(_role(role, change) for role in dag.roles)
    nodes = tuple(_node(node, change) for node in dag.nodes)
    changed = any(
        new is not old for new, old in zip((*roles, *nodes), (*dag.roles, *dag.nodes), strict=True)
    )
    if changed:
        return DAG(roles, nodes)
    return dag


def _role(role: Role, change: Change) -> Role:
    options = options_of(role.build)
    changed = with_models(options, change)
    if changed is options:
        return role
    return dataclasses.replace(role, build=partial(bare(role.build), **changed))


def _node(node: Node, change: Change) -> Node:
    changed = with_models(node.options, change)
    if changed is node.options:
        return node
    return dataclasses.replace(node, options=changed)


def _changed(values: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Return the entries that differ once they are changed."""
    changed = {name: with_models(value, change) for name, value in values.items()}
    return {name: value for name, value in changed.items() if value is not values[name]}
