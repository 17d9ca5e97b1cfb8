"""Reads YAML of other systems: plain values, with those interpolations resolved that the text
itself can resolve.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from siirl_dask.config.file.coerce import escaped
from siirl_dask.config.file.layers import first_line, override
from siirl_dask.errors import ConfigError

_READERS = ("oc.env", "oc.decode")  # the second resolves what is in the text that it is given
_BASE_60 = re.compile(r"\s*[-+]?\d+(:\d+)+\s*")


def foreign_values(text: str, name: str) -> dict[str, Any]:
    """Return the mapping of a YAML text that errors call ``name``. An interpolation that asks for
    an environment variable, or that cannot be resolved, stays as text, also where others lead to
    it. ConfigError if it is not YAML, or no mapping.
    """
    try:
        tree = OmegaConf.load(StringIO(text))
    except MarkedYAMLError as error:
        line = 1
        if error.problem_mark:
            line = error.problem_mark.line + 1
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem}") from error
    except (OSError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{name}: not YAML: {first_line(error)}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{name}: expected a mapping of groups")
    written = OmegaConf.to_container(tree, resolve=False)
    values: dict[str, Any] = _plain(OmegaConf.create(_unread(written)))
    return values


def foreign_value(text: str) -> Any:
    """Return the value of ``text`` as the right side of ``key=value``: a number, a list, or the
    text itself. ``1:30`` is a text, as on Hydra's command line, where YAML 1.1 has base 60.
    """
    if _BASE_60.fullmatch(text):
        return text
    try:
        return override(f"group.key={text}").values["group"]["key"]
    except ConfigError:
        return text


def _unread(value: Any) -> Any:
    """Return plain data in which a text that asks for the environment is no interpolation."""
    match value:
        case str() if any(resolver in value for resolver in _READERS):
            return escaped(value)
        case dict():
            return {key: _unread(item) for key, item in value.items()}
        case list():
            return [_unread(item) for item in value]
    return value


def _plain(node: DictConfig | ListConfig) -> Any:
    """Return a part of a tree as plain data."""
    if isinstance(node, ListConfig):
        return [_leaf(node, place) for place in range(len(node))]
    return {str(key): _leaf(node, key) for key in node}


def _leaf(node: DictConfig | ListConfig, key: Any) -> Any:
    raw = OmegaConf.to_container(node, resolve=False)
    text = raw
    if isinstance(raw, (dict, list)):
        text = raw[key]
    if text == "???":
        return None
    try:
        value = node[key]
    except OmegaConfBaseException:
        return text
    if isinstance(value, DictConfig | ListConfig):
        return _plain(value)
    return value
