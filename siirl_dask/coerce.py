"""Plain values as the typed Config, interpolations resolved, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from siirl_dask.config import Config
from siirl_dask.configfile.layers import GROUPS, elsewhere, first_line
from siirl_dask.errors import ConfigError, did_you_mean

_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def defaults(kind: type[Any]) -> dict[str, Any]:
    """As written on the class: unlike an instance's, they still hold their interpolations."""
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return plain({f.name: made.get(f.name, f.default) for f in fields(kind)})  # type: ignore[no-any-return]


def config_of(tree: DictConfig, raw: Mapping[str, Any], origins: Mapping[str, str], path: str) -> Config:
    """``tree`` is what ``raw`` became."""
    if missing := [f"{group}.{key}" for group in GROUPS for key, value in raw[group].items() if value == "???"]:
        raise ConfigError(f"{path}: {', '.join(missing)}: a value is needed; write it there, or add {missing[0]}=...")
    groups = {}
    for group, kind in GROUPS.items():
        hints, values = get_type_hints(kind), resolved(tree, group, path)
        where = {key: f"{origins.get(f'{group}.{key}', path)}: {group}.{key}" for key in values}
        typed = {key: _convert(value, hints[key], where[key]) for key, value in values.items()}
        groups[group] = _checked(kind, typed, path)
    config: Config = _checked(Config, groups, path)
    return config


def _checked(kind: type[Any], values: Mapping[str, Any], path: str) -> Any:
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def resolved(tree: DictConfig, key: str, path: str) -> Any:
    """The part of the tree under ``key`` as plain data, None when there is none."""
    part = tree.get(key)
    try:
        return OmegaConf.to_container(part, resolve=True, throw_on_missing=True) if OmegaConf.is_config(part) else part
    except (OmegaConfBaseException, RecursionError) as error:
        given = getattr(error, "full_key", None) or key
        hint = ""
        if isinstance(error, InterpolationKeyError) and (wanted := re.search(r"'(.*)'", str(error))):
            everything = [f"{group}.{f.name}" for group, kind in GROUPS.items() for f in fields(kind)]
            hint = elsewhere(wanted[1].split(".")[-1]) or did_you_mean(wanted[1], everything)
        text = "its interpolation never ends" if isinstance(error, RecursionError) else first_line(error)
        raise ConfigError(f"{path}: {given}: {text}{hint}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type of a config field. ConfigError names what was expected."""
    if hint is Any:
        return value
    kind, args = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return None if value is None else _convert(value, args[0], where)
    if kind is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r}: expected a mapping")
        return {str(key): _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if kind in (list, tuple):
        length = len(args) if kind is tuple else None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise ConfigError(f"{where}={value!r}: expected a list of {length or 'any number of'} values, as in [0, 1]")
        return kind(_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
    if issubclass(hint, StrEnum):
        valid = [member.value for member in hint]
        if value not in valid:
            raise ConfigError(f"{where}={value!r}: expected one of {valid}{did_you_mean(str(value), valid)}")
        return hint(value)
    return _scalar(value, hint, where)


def _scalar(value: Any, kind: type[Any], where: str) -> Any:
    """Numbers may come as text (an environment variable), whole numbers as 1e3; nothing else is turned into another."""
    try:
        if kind is bool or value is None or isinstance(value, (bool, list, dict)):
            if kind is bool and isinstance(value, bool):
                return value
        elif kind is not int or not isinstance(value, float) or value.is_integer():
            return kind(value)
    except ValueError:
        pass
    raise ConfigError(f"{where}={value!r}: expected {_EXPECTED[kind]} ({kind.__name__})")


def plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as what YAML has."""
    match value:
        case Config():
            return plain(asdict(value))
        case StrEnum():
            return value.value
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def escaped(value: Any) -> Any:
    """Plain data with ``${`` written so that OmegaConf takes it literally."""
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
        case Mapping():
            return {key: escaped(item) for key, item in value.items()}
        case list():
            return [escaped(item) for item in value]
    return value
