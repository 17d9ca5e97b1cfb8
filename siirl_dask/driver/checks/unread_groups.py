"""Refuses groups of the configuration that no part of the DAG reads: they would have no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from siirl_dask.config import Config, EndpointConfig, EnvironmentsConfig
from siirl_dask.errors import ConfigError
from siirl_dask.planner import DAG, options_of

_READERS = {
    "environments": (
        EnvironmentsConfig,
        "siirl_dask.nodes:play, as configs/dags/turns.yaml and siirl_dask.turns have",
    ),
    "endpoint": (EndpointConfig, "siirl_dask.nodes:run_agents, as docs/endpoint.md shows"),
}
"""Groups that a DAG reads as a whole or not at all, and a node that does."""


def check_read(config: Config, dags: Sequence[DAG]) -> None:
    """Raise ConfigError for an agent that no node acts for, and for environments or an endpoint
    that nothing reads.

    A node or a role reads a group that is among its options, under the group's name or any other.
    """
    nodes = [node for dag in dags for node in dag.nodes]
    roles = [role for dag in dags for role in dag.roles]
    acting = {node.agent for node in nodes}
    idle = [name for name in config.agents if name not in acting]
    if idle:
        raise ConfigError(
            f"agents.{idle[0]}: no node of the DAG has agent: {idle[0]}, so that it would neither "
            "act nor learn; take the recipe siirl_dask.agents, add its nodes as in "
            "configs/dags/agents.yaml, or leave it out"
        )
    all_options = [dict(node.options) for node in nodes]
    all_options += [dict(options_of(role.build)) for role in roles]
    for group, (kind, reader) in _READERS.items():
        key = _first_set(getattr(config, group), kind)
        if key is not None and not any(_has(options, group, kind) for options in all_options):
            value = getattr(getattr(config, group), key)
            raise ConfigError(
                f"{group}.{key}={value!r}: no node of the DAG reads {group}; expected one that "
                f"runs {reader}, or leave the key out"
            )


def _first_set(group: Any, kind: type[Any]) -> str | None:
    """Return the first key of a group that differs from its default; None where none does."""
    default = kind()
    names = (field.name for field in fields(kind))
    return next((name for name in names if getattr(group, name) != getattr(default, name)), None)


def _has(options: Mapping[str, Any], group: str, kind: type[Any]) -> bool:
    if group in options:
        return True
    return any(isinstance(value, kind) for value in options.values())
