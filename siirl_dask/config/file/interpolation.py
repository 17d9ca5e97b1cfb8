"""Resolves ``${group.key}`` in the parts of a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from siirl_dask.config.file.layers import first_line, key_hint
from siirl_dask.errors import ConfigError

_PATH = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[A-Za-z_]\w*\}")
_DEEPEST = 20
"""Interpolations within one another that are followed here: more may be a circle."""


class _OmegaConfNeeded(Exception):
    """A value is more than a path of names that leads to another."""


class Interpolations:
    """The parts of a configuration by name, groups, roles and nodes, as plain data.

    Paths of names are followed here. Whatever else an interpolation may be (a resolver, a relative
    path, an index, one that leads nowhere) is OmegaConf's: to wrap all values for it takes two
    thirds of the time in which a configuration is loaded. A text with variables of the environment
    or escaped interpolations alone refers to no other value, and OmegaConf gets it by itself.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = dict(parts)
        self._wrapped: DictConfig | None = None

    def replace(self, name: str, values: Any) -> None:
        """Let interpolations into a part find these values, in which ``${`` is escaped."""
        self._parts[name] = values
        self._wrapped = None

    def resolved(self, name: str, path: str) -> Any:
        """Return a copy of a part, interpolations resolved; None if there is none.

        ConfigError, which calls the configuration ``path``, for one that leads nowhere.
        """
        try:
            return self._followed(self._parts.get(name), 0)
        except _OmegaConfNeeded:
            return self._by_omegaconf(name, path)

    def _followed(self, value: Any, depth: int) -> Any:
        match value:
            case str():
                return self._text(value, depth)
            case dict():
                return {key: self._followed(item, depth) for key, item in value.items()}
            case list():
                return [self._followed(item, depth) for item in value]
        return value

    def _text(self, text: str, depth: int) -> Any:
        if text == "???":
            raise _OmegaConfNeeded  # a value that is missing, which it reports
        if "${" not in text:
            return text
        if "${" not in _ENVIRONMENT.sub("", _ESCAPED.sub("", text)):
            return _alone(text)
        if depth == _DEEPEST or "\\" in text or "${" in _PATH.sub("", text):
            raise _OmegaConfNeeded
        whole = _PATH.fullmatch(text)
        if whole:
            return self._followed(self._at(whole[1]), depth + 1)
        return _PATH.sub(lambda found: self._inserted(found[1], depth), text)

    def _inserted(self, path: str, depth: int) -> str:
        value = self._followed(self._at(path), depth + 1)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise _OmegaConfNeeded
        return str(value)

    def _at(self, path: str) -> Any:
        value: Any = self._parts
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                raise _OmegaConfNeeded
            value = value[name]
        return value

    def _by_omegaconf(self, name: str, path: str) -> Any:
        if self._wrapped is None:
            self._wrapped = OmegaConf.create(self._parts)
        try:
            part = self._wrapped.get(name)
            if not OmegaConf.is_config(part):
                return part
            return OmegaConf.to_container(part, resolve=True, throw_on_missing=True)
        except RecursionError as error:
            raise ConfigError(f"{path}: {name}: its interpolation never ends") from error
        except OmegaConfBaseException as error:
            place = name
            if error.full_key:
                place = error.full_key
            text = f"{path}: {place}: {first_line(error)}{_hint(error)}"
            raise ConfigError(text) from error


def _alone(text: str) -> Any:
    """Return what OmegaConf makes of a text that refers to no other value."""
    try:
        values = OmegaConf.to_container(
            OmegaConf.create([text]), resolve=True, throw_on_missing=True
        )
    except OmegaConfBaseException as error:
        raise _OmegaConfNeeded from error  # it names the value's place where it has all parts
    assert isinstance(values, list)
    return values[0]


def _hint(error: OmegaConfBaseException) -> str:
    """Return the nearest spelling of the key that an interpolation names, or how a variable of the
    environment is named; empty for neither.
    """
    if isinstance(error, UnsupportedInterpolationType):
        return "; a variable of the environment is written ${oc.env:NAME}"
    named = re.search(r"'([^']*)'", str(error))
    if named is None:
        return ""
    if "Environment variable" in str(error):
        return f"; set it, or give it a default: ${{oc.env:{named[1]},default}}"
    if not isinstance(error, InterpolationKeyError):
        return ""
    if named[1] in os.environ:
        return f"; the variable of the environment is written ${{oc.env:{named[1]}}}"
    return key_hint(named[1])
