"""Reads YAML files and ``key=value`` overrides into a checked Config and a DAG in plain data.

    base: grpo_base.yaml            # another file, read first; its path is relative to this one
    rollout: {n: 16}                # values, by group: see siirl_dask/config
    roles: {policy: {build: "siirl_dask.training:build_trainer", with: {trainer: "${trainer}"}}}
    nodes:                          # a list replaces the base's; a mapping by name changes it, node by node
      update: {rows: balanced, with: {minibatches: "${algorithm.minibatches}"}}
      reference_logprobs: null      # without this one

A dict, a DictConfig or a dataclass is read as a file is: see objects.py.

Mistakes are refused here, before anything starts. OmegaConf reads and interpolates; ``siirl_dask/coerce.py`` checks the
types against the dataclasses of siirl_dask/config, since OmegaConf takes 1.5 for an int and returns tuples as lists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from siirl_dask.config import Config
from siirl_dask.config.file.agents import merged_agents, whole_agents
from siirl_dask.config.file.blame import WrittenParts
from siirl_dask.config.file.cluster_spec import ClusterSpec, read_cluster_spec
from siirl_dask.config.file.coerce import config_of, defaults, escaped, plain
from siirl_dask.config.file.foreign import foreign_value, foreign_values
from siirl_dask.config.file.interpolation import Interpolations
from siirl_dask.config.file.layers import (
    AGENTS,
    GROUPS,
    SHIPPED,
    Layer,
    check_keys,
    file_layers,
    merged,
    override,
    path_of,
    shipped,
    shipped_files,
    shipped_folder,
    text_layer,
)
from siirl_dask.config.file.node_edits import NodeList, merged_nodes
from siirl_dask.config.file.objects import (
    ConfigObject,
    StructuredConfig,
    name_of,
    object_layers,
)
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.wording import redacted

__all__ = [
    "SHIPPED",
    "ClusterSpec",
    "ConfigFile",
    "ConfigObject",
    "ConfigSource",
    "Interpolated",
    "StructuredConfig",
    "coerce",
    "dump",
    "foreign_value",
    "foreign_values",
    "layers",
    "load",
    "load_config_file",
    "load_recorded",
    "load_text",
    "read_cluster_spec",
    "shipped",
    "shipped_files",
    "shipped_folder",
]


ConfigSource: TypeAlias = "str | os.PathLike[str] | ConfigObject"
"""A YAML file or an object; ``siirl_dask:NAME`` names a file that comes with the package."""


class Interpolated(ConfigError):
    """A recorded configuration has an interpolation, which no run records."""


_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""Beginning of an interpolation: one with an odd number of backslashes before it is text."""


@dataclass(frozen=True)
class ConfigFile:
    """The content of a YAML file: a Config, and the DAG's parts as plain data, empty if the file
    has none.
    """

    config: Config
    roles: dict[str, Any] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    validation_nodes: list[Any] = field(default_factory=list)
    role_places: dict[str, str] = field(default_factory=dict)
    """File and line, or override, of each role, for errors."""
    node_places: list[str] = field(default_factory=list)
    """File and line, or override, of each node, for errors."""
    validation_node_places: list[str] = field(default_factory=list)
    """File and line, or override, of each validation node, for errors."""
    written: WrittenParts = field(default_factory=WrittenParts)

    def blamed(self, error: PlanError) -> PlanError:
        """Return an error of the DAG's, which begins with the places of the keys that it is about,
        where these were set by somebody.
        """
        values = plain(self.config)
        keys = {f"{group}.{key}": item for group in GROUPS for key, item in values[group].items()}
        return PlanError(self.written.blamed(str(error), keys))


def load(source: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a YAML file, or of ``siirl_dask:NAME``, with overrides
    (``trainer.lr=2e-6``); a DAG in the file is ignored.

    ``source`` may be an object as well: a dict or a DictConfig of groups, as Hydra composes one,
    or a dataclass with groups as its fields, such as ``Config``. ``base`` in it names files, and
    interpolations may use any resolver that is registered with OmegaConf.

    ConfigError names the file or override, the key, what was expected and the nearest valid
    spelling.
    """
    return load_config_file(source, overrides).config


def load_config_file(
    source: ConfigSource, overrides: Sequence[str] = (), *, data_url: str | None = None
) -> ConfigFile:
    """Return a file or an object, its bases and the overrides (``trainer.lr=2e-6``,
    ``nodes.update.rows=balanced``) as one. ``data_url`` stands for a ``data.url`` that none of
    them sets.

    ConfigError names the file or override, the key, what was expected and the nearest valid
    spelling.
    """
    if isinstance(source, str | os.PathLike):
        name = str(source)
        layers = file_layers(path_of(source))
    else:
        name = name_of(source)
        layers = object_layers(source)
    return _assemble([*layers, *_override_layers(overrides)], name, data_url)


def _override_layers(overrides: Sequence[str]) -> list[Layer]:
    if isinstance(overrides, list | tuple) and all(isinstance(text, str) for text in overrides):
        known = [_override(text) for text in overrides]
        return [replace(layer, values=deepcopy(layer.values)) for layer in known]
    raise ConfigError(
        f"overrides={overrides!r:.200}: expected a list of texts, such as ['trainer.lr=2e-6']"
    )


@lru_cache(maxsize=512)
def _override(text: str) -> Layer:
    """Return the layer of ``key=value``, of whose values callers take a copy: reading the overrides
    again takes half the time of loading a configuration again.
    """
    return override(text)


def load_text(text: str | bytes, name: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a YAML text, as ``load``; errors call it ``name``. ConfigError
    if it has a base.
    """
    return _assemble([text_layer(text, name), *_override_layers(overrides)], name).config


def load_recorded(
    text: str | bytes,
    name: str,
    overrides: Sequence[str] = (),
    change: Callable[[Any], Any] = lambda values: values,
) -> Config:
    """Return the configuration of a text that ``dump`` wrote, which has plain values alone.
    ``change`` returns the values to take in place of those in the text.

    ConfigError as by ``load_text``, Interpolated for an interpolation in the text: whoever reads a
    run's folder need not have written it, and ``${oc.env:TOKEN}`` would be filled from the reader's
    environment.
    """
    layer = text_layer(text, name)
    for key, value in _texts(layer.values, ""):
        if _INTERPOLATION.search(value):
            raise Interpolated(
                f"{name}: {key}={value!r}: expected a plain value, as a run records it; an "
                "interpolation would be filled from other keys or from the environment of whoever "
                "reads it, so the file is not used"
            )
    layer = replace(layer, values=change(layer.values))
    return _assemble([layer, *_override_layers(overrides)], name).config


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of plain data, names in mappings among them, each with its key."""
    match value:
        case str():
            yield key, value
        case Mapping():
            for name, item in value.items():
                yield key, str(name)
                yield from _texts(item, f"{key}.{name}" if key else str(name))
        case list():
            for index, item in enumerate(value):
                yield from _texts(item, f"{key}[{index}]")


def _assemble(layers: Sequence[Layer], name: str, data_url: str | None = None) -> ConfigFile:
    for layer in layers:
        check_keys(layer)
    values, nodes, validation = _merged(layers)
    if values["data"]["url"] == "???" and data_url is not None:
        values["data"]["url"] = data_url
    parts = Interpolations({**values, "nodes": nodes.items, "validation_nodes": validation.items})
    config = config_of(parts, values, _origins(layers), name)
    for group, checked in plain(config).items():
        if checked != values[group]:
            parts.replace(group, escaped(checked))  # interpolations in the DAG see checked values
    training_nodes = parts.resolved("nodes", name)
    validation_nodes = parts.resolved("validation_nodes", name)
    roles = _container(parts.resolved("roles", name), dict, "roles", name)
    removed = _removed_roles(layers)
    return ConfigFile(
        config,
        roles={role: spec for role, spec in roles.items() if role not in removed},
        nodes=_container(training_nodes, list, "nodes", name),
        validation_nodes=_container(validation_nodes, list, "validation_nodes", name),
        role_places=_role_places(layers),
        node_places=nodes.places_of(training_nodes),
        validation_node_places=validation.places_of(validation_nodes),
        written=_written(layers, values, [nodes, validation]),
    )


def dump(config: Config, *, secrets: bool = True) -> str:
    """Return YAML from which ``load`` makes an equal Config; without ``secrets`` these are
    ``[redacted]`` in it.
    """
    values = plain(config) if secrets else redacted(plain(config))
    return OmegaConf.to_yaml(OmegaConf.create(escaped(values)))


def _merged(layers: Sequence[Layer]) -> tuple[dict[str, Any], NodeList, NodeList]:
    """Return groups with roles, and the two lists of nodes, interpolations unresolved."""
    values: Any = {group: defaults(kind) for group, kind in GROUPS.items()}
    lists = {"nodes": NodeList([], []), "validation_nodes": NodeList([], [])}
    agents: dict[str, Any] = {}
    for layer in layers:
        present = {key: value for key, value in layer.values.items() if value is not None}
        for key in lists:
            if key in present:
                lists[key] = merged_nodes(lists[key], layer, key)
        agents = merged_agents(agents, present.pop(AGENTS, {}), layer.depth)
        values = merged(
            values, {key: value for key, value in present.items() if key not in lists}, layer.depth
        )
    values[AGENTS] = whole_agents(agents, values)
    if values["data"]["sources"] and values["data"]["url"] == "???":
        values["data"]["url"] = None  # not missing: the sources stand in for it
    return values, lists["nodes"], lists["validation_nodes"]


def _container(value: Any, kind: type[Any], key: str, path: object) -> Any:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{path}: {key}={value!r}: expected a "
            f"{'list' if kind is list else 'mapping by role name'}"
        )
    if value is None:
        return kind()
    return value


def _role_places(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the place of each role; a role of a later file replaces the earlier one whole."""
    parts = ((layer, layer.values.get("roles")) for layer in layers)
    return {
        name: layer.place("roles", name)
        for layer, roles in parts
        if isinstance(roles, dict)
        for name in roles
    }


def _removed_roles(layers: Sequence[Layer]) -> set[str]:
    """Return the roles that are null in a layer, after one that has them."""
    there: set[str] = set()
    removed: set[str] = set()
    for layer in layers:
        roles = layer.values.get("roles")
        for name, spec in roles.items() if isinstance(roles, dict) else ():
            if spec is None:
                removed |= {name} & there
            else:
                there.add(name)
                removed.discard(name)
    return removed


def _written(
    layers: Sequence[Layer], values: Mapping[str, Any], lists: Sequence[NodeList]
) -> WrittenParts:
    places: dict[str, tuple[int, str]] = {}
    for number, layer in enumerate(layers):
        for group, inner in layer.values.items():
            if group in GROUPS and isinstance(inner, dict):
                places |= {f"{group}.{key}": (number, layer.place(group, key)) for key in inner}
    specs = [spec for part in lists if isinstance(part.items, list) for spec in part.items]
    roles = values.get("roles")
    return WrittenParts(roles if isinstance(roles, dict) else {}, specs, places)


def _origins(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the origin of the last value of each ``group.key``."""
    groups = (
        (layer.origin, group, inner) for layer in layers for group, inner in layer.values.items()
    )
    return {
        f"{group}.{key}": origin
        for origin, group, inner in groups
        if isinstance(inner, dict)
        for key in inner
    }
