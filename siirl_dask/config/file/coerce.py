"""Converts plain values to the typed Config, interpolations resolved, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from typing import Any

from siirl_dask.coerce import Coercer, field_types
from siirl_dask.config import Config
from siirl_dask.config.file.interpolation import Interpolations
from siirl_dask.config.file.layers import AGENTS, GROUPS
from siirl_dask.errors import ConfigError

_coerce = Coercer(ConfigError)


def defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the defaults of a class, with interpolations that an instance would have resolved."""
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return plain({f.name: made.get(f.name, f.default) for f in fields(kind)})  # type: ignore[no-any-return]


def config_of(
    parts: Interpolations,
    raw: Mapping[str, Any],
    origins: Mapping[str, str],
    path: str,
) -> Config:
    """Return the Config of ``parts``, which were made of ``raw``. ConfigError for a missing or
    wrong value.
    """
    missing = [
        f"{group}.{key}" for group in GROUPS for key, value in raw[group].items() if value == "???"
    ]
    if missing:
        raise ConfigError(
            f"{path}: {', '.join(missing)}: a value is needed; write it there, or add "
            f"{missing[0]}=..."
        )
    groups = {}
    for group, kind in GROUPS.items():
        hints = field_types(kind)
        values = parts.resolved(group, path)
        where = {key: f"{origins.get(f'{group}.{key}', path)}: {group}.{key}" for key in values}
        typed = {key: _coerce(value, hints[key], where[key]) for key, value in values.items()}
        groups[group] = _checked(kind, typed, path)
    hint = field_types(Config)[AGENTS]
    groups[AGENTS] = _coerce(parts.resolved(AGENTS, path), hint, f"{path}: {AGENTS}")
    config: Config = _checked(Config, groups, path)
    return config


def _checked(kind: type[Any], values: Mapping[str, Any], path: str) -> Any:
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def plain(value: Any) -> Any:
    """Return dataclasses, enums and tuples as mappings, texts and lists, as YAML has them."""
    match value:
        case _ if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        case StrEnum():
            return value.value
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def escaped(value: Any) -> Any:
    """Return plain data with ``${`` escaped, so that OmegaConf takes it literally."""
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
        case Mapping():
            return {key: escaped(item) for key, item in value.items()}
        case list():
            return [escaped(item) for item in value]
    return value
