"""Converts plain values to the typed Config, interpolations resolved, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from siirl_dask.coerce import Coercer, field_types
from siirl_dask.config import Config
from siirl_dask.config.file.interpolation import Interpolations
from siirl_dask.config.file.layers import AGENTS, GROUPS
from siirl_dask.errors import ConfigError

_coerce = Coercer(ConfigError)
_KEY = re.compile(r"\w+\.\w+")


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
        typed = {}
        for key, value in values.items():
            origin = origins.get(f"{group}.{key}", path)
            with _placed(origin, group):
                typed[key] = _coerce(value, hints[key], f"{origin}: {group}.{key}")
        with _placed(path, group, origins):
            groups[group] = kind(**typed)
    hint = field_types(Config)[AGENTS]
    with _placed(f"{path}: {AGENTS}", AGENTS):
        groups[AGENTS] = _coerce(parts.resolved(AGENTS, path), hint, f"{path}: {AGENTS}")
    with _placed(path, "", origins):
        return Config(**groups)


@contextmanager
def _placed(
    origin: str, group: str, origins: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Begin a ConfigError with where the value was written, unless it does so: ``origins`` has the
    place of each ``group.key`` that an error may begin with, and ``origin`` is that of all others.
    A critic has the keys of ``trainer``, which is what its class calls them.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if text.startswith(origin):
            raise
        if group == "critic":
            text = text.replace("trainer.", "critic.")
        key = _KEY.match(text)
        place = origin if key is None else origins.get(key[0], origin)
        raise ConfigError(f"{place}: {text}") from error


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
