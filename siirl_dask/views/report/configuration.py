"""Compares configurations for a report: where runs differ, or what a single one sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from siirl_dask.config import Config
from siirl_dask.config.file.layers import config_keys
from siirl_dask.planner import canonical
from siirl_dask.runs.folder import RunIdentity
from siirl_dask.views.report.gather import RunFacts
from siirl_dask.wording import redacted

_LONGEST = 300  # characters of a value


def differences(runs: Sequence[RunFacts]) -> dict[str, list[str]]:
    """Return the keys whose values differ, each with every run's value as text."""
    values = [_values(run.config) for run in runs]
    different = {}
    for key in config_keys():
        texts = [_text(own[key]) if key in own else "cannot be read" for own in values]
        if len({text for text, own in zip(texts, values, strict=True) if own}) > 1:
            different[key] = texts
    return different


def settings(config: Config) -> dict[str, tuple[str, str]]:
    """Return the keys that are not at their defaults, each with its value and the default as
    text.
    """
    own = _values(config)
    usual = _values(Config())
    return {key: (_text(own[key]), _text(usual[key])) for key in own if own[key] != usual[key]}


def dag_differences(one: RunFacts, other: RunFacts) -> list[str]:
    """Return the changes from one run's DAG to another's, as ``nodes.update.with.lr: 1 -> 2``."""
    first, second = (
        redacted({"roles": run.dag["roles"], "nodes": _named(run.dag)}) for run in (one, other)
    )
    changes = RunIdentity({}, first).differences(RunIdentity({}, second))
    return [change.removeprefix("DAG: ")[:_LONGEST] for change in changes]


def _named(dag: Mapping[str, Any]) -> list[Any]:
    return [node for node in dag["nodes"] if isinstance(node, dict) and "name" in node]


def _values(config: Config | None) -> dict[str, Any]:
    if config is None:
        return {}
    values = {}
    for key in config_keys():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = redacted({key: canonical(value)})[key]  # earlier versions recorded secrets
    return values


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..."
