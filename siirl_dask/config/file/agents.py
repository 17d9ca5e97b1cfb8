"""Merges the group ``agents``: what several files say of an agent, and then the run's groups
below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, cast

from siirl_dask.coerce import field_types
from siirl_dask.config.agents import AgentConfig
from siirl_dask.config.file.layers import merged

OWN: Mapping[str, type[Any]] = {
    key: kind
    for key, kind in field_types(AgentConfig).items()
    if is_dataclass(cast("object", kind))
}
"""Groups that an agent has of its own, by name."""


def merged_agents(old: Mapping[str, Any], new: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the agents of earlier layers with those of ``new``: agent by agent, group by group,
    key by key.
    """
    agents = dict(old)
    for name, own in new.items():
        before = agents.get(name)
        if not before:  # None is an entry that YAML leaves empty
            before = {}
        deep = max(1, depth - 2)  # agents, and the agent's name
        changed = {
            key: merged(before.get(key), value, deep, OWN[key]) if key in OWN else value
            for key, value in (own or {}).items()
        }
        agents[str(name)] = {**before, **changed}
    return agents


def whole_agents(agents: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the agents with all that they do not say themselves: of the agent that they share
    with, or whose base they have, or of the run.

    All but the first sample one turn of each row, unless they say otherwise. ``base`` becomes the
    list of all agents over it.
    """
    whole: dict[str, Any] = {}
    bases = {name: _first(own.get("base")) for name, own in agents.items()}
    for name, own in agents.items():
        shared = own.get("share")
        origin = shared
        if not shared:
            origin = bases[name]
        below = values
        if isinstance(origin, str):
            below = whole.get(origin, values)
        several = {}
        if whole:
            several = {"rollout": {"n": 1}}
        whole[name] = {"share": shared, "base": _over_base(bases, bases[name] or name)}
        for group, kind in OWN.items():
            over = merged(several.get(group, {}), own.get(group) or {}, 1, kind)
            whole[name][group] = merged(below[group], over, 1, kind)
    return whole


def _first(base: Any) -> Any:
    """Return the agent whose base it is, written as its name, or as the list of all over it,
    itself first.
    """
    if not isinstance(base, list):
        return base
    if base:
        return base[0]
    return None


def _over_base(bases: Mapping[str, Any], first: Any) -> list[Any]:
    """Return the agents over the base of ``first``, itself first; none where no other has its
    base.
    """
    others = [name for name, base in bases.items() if base == first]
    if others:
        return [first, *(name for name in others if name != first)]
    return []
