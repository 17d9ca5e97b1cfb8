"""Takes configurations that are objects: mappings, OmegaConf's configs, dataclasses.

An object is read as a file is: its groups may be few, ``base`` may name files (relative to the
working directory), and its interpolations are resolved once the overrides are in, with the
resolvers that the program has registered. A part of a larger config, such as ``cfg.train``, may
refer to what is beside it there, so it is resolved within the larger one first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar, Protocol, TypeAlias

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from siirl_dask.config import Config
from siirl_dask.config.file.coerce import escaped, plain
from siirl_dask.config.file.layers import Layer, base_layers, first_line
from siirl_dask.errors import ConfigError


class StructuredConfig(Protocol):
    """A dataclass, or an instance of one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


ConfigObject: TypeAlias = "Mapping[str, Any] | StructuredConfig | type[StructuredConfig]"
"""A dict, a DictConfig, or a dataclass whose fields are groups or parts of them."""


def name_of(source: ConfigObject) -> str:
    """Return the name of a configuration's object in messages: that of its class."""
    if isinstance(source, type):
        return source.__name__
    return type(source).__name__


def object_layers(source: ConfigObject) -> list[Layer]:
    """Return the layers of an object: those of its bases, in order, then its own.

    ConfigError, which names the key, for a value that no YAML file could have.
    """
    name = name_of(source)
    if isinstance(source, Config):
        return [Layer(name, escaped(plain(source)))]  # its values are final
    values = _with_yaml_values(_container(source, name), name, "")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: holds a list: expected groups of values")
    bases = base_layers(values, name, Path(), ())
    return [*bases, Layer(name, values)]


def _container(source: ConfigObject, name: str) -> Any:
    """Return the object as plain data, interpolations unresolved unless it is part of another."""
    try:
        tree = _tree(source)
        if tree._get_parent() is None:
            return OmegaConf.to_container(tree, resolve=False)
        return escaped(OmegaConf.to_container(tree, resolve=True))  # its values are final
    except OmegaConfBaseException as error:
        place = ""
        if error.full_key:
            place = f"{error.full_key}: "
        raise ConfigError(f"{name}: {place}{first_line(error)}") from error


def _tree(source: ConfigObject) -> DictConfig:
    if isinstance(source, DictConfig):
        return source
    if isinstance(source, Mapping):
        return OmegaConf.create(dict(source))
    if is_dataclass(source):
        tree: DictConfig = OmegaConf.structured(source)
        return tree
    raise ConfigError(
        f"{source!r:.200} is no configuration: expected a path, a mapping, a DictConfig or a "
        "dataclass"
    )


def _with_yaml_values(value: Any, name: str, key: str) -> Any:
    """Return plain data with the texts that YAML has for paths and members of enums."""
    match value:
        case Mapping():
            plain = {}
            for inner, item in value.items():
                path = f"{key}.{inner}" if key else str(inner)
                plain[str(inner)] = _with_yaml_values(item, name, path)
            return plain
        case list() | tuple():
            return [_with_yaml_values(item, name, f"{key}[{at}]") for at, item in enumerate(value)]
        case Enum():
            if isinstance(value, str):
                return value.value
            return value.name
        case PurePath():
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    raise ConfigError(
        f"{name}: {key}={value!r:.200}: expected a value that YAML has: a text, a number, true or "
        "false, null, a list or a mapping"
    )
