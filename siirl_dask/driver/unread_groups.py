"""Refuses groups of the configuration that no part of the DAG reads: they would be set, and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from siirl_dask.config import Config, EndpointConfig, EnvironmentsConfig
from siirl_dask.errors import ConfigError
from siirl_dask.planner import DAG
from siirl_dask.planner.contract import options_of

_READERS = {
    "environments": (EnvironmentsConfig, "siirl_dask.nodes:play, as configs/dags/turns.yaml and siirl_dask.turns have"),
    "endpoint": (EndpointConfig, "siirl_dask.nodes:run_agents, as docs/endpoint.md shows"),
}
"""Groups that a DAG reads as a whole or not at all, and a node that does."""


def check_read(config: Config, dags: Iterable[DAG]) -> None:
    """Raise ConfigError for an agent that no node acts for, and for environments or an endpoint that nothing is given.

    A node or a role is given a group as the option of its name, or as any other option.
    """
    dags = [*dags]
    acting = {node.agent for dag in dags for node in dag.nodes}
    if idle := [name for name in config.agents if name not in acting]:
        raise ConfigError(
            f"agents.{idle[0]}: no node of the DAG has agent: {idle[0]}, so that it would neither act nor learn; take "
            "the recipe siirl_dask.agents, add its nodes as in configs/dags/agents.yaml, or leave it out"
        )
    given = [dict(node.options) for dag in dags for node in dag.nodes]
    given += [dict(options_of(role.build)) for dag in dags for role in dag.roles]
    for group, (kind, reader) in _READERS.items():
        key = _first_set(getattr(config, group), kind)
        if key is not None and not any(_has(options, group, kind) for options in given):
            value = getattr(getattr(config, group), key)
            raise ConfigError(
                f"{group}.{key}={value!r}: no node of the DAG reads {group}; expected one that runs {reader}, or leave "
                "the key out"
            )


def _first_set(group: Any, kind: type[Any]) -> str | None:
    """Return the first key of a group that differs from its default; None where none does."""
    default = kind()
    names = (field.name for field in fields(kind))
    return next((name for name in names if getattr(group, name) != getattr(default, name)), None)


def _has(options: Mapping[str, Any], group: str, kind: type[Any]) -> bool:
    return group in options or any(isinstance(value, kind) for value in options.values())
