"""YAML files and ``key=value`` overrides, as a checked Config.

    base: grpo_base.yaml            # another file, read first; its path is relative to this one
    rollout: {n: 16}                # values, by group: see config.py
    roles: {policy: {build: "siirl_dask.training:build_trainer", with: {trainer: "${trainer}"}}}
    nodes: [{name: rollout, run: "siirl_dask.nodes:generate", role: rollout, with: {n: "${rollout.n}"}}]

Whatever cannot be used is refused here, before anything starts. OmegaConf reads, merges and interpolates; the types are
checked against the dataclasses of config.py by hand: OmegaConf takes 1.5 for an int and gives tuples back as lists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError, did_you_mean

_GROUPS: Mapping[str, type[Any]] = get_type_hints(Config)
_DAG_KEYS = ("roles", "nodes", "validation_nodes")
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class ConfigFile:
    """What a YAML file holds, as plain data. The DAG parts are empty when the file has none."""

    config: Config
    roles: dict[str, Any] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    validation_nodes: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Values and where they come from. Later layers win."""

    origin: str
    values: Mapping[str, Any]
    depth: int = 2
    """Levels that are merged key by key: groups and their keys. A mapping below (a placement, a role) is a value, and
    replaces the earlier one; ``cluster.placement.policy=[2]`` goes one level deeper."""


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ConfigFile:
    """The file, its bases and the overrides (``trainer.lr=2e-6``, ``cluster.placement.policy=[2,3]``) as one.

    ConfigError names the file or override, the key, what was expected and the nearest valid spelling.
    """
    layers = [*_file_layers(Path(path)), *(_override(text) for text in overrides)]
    for layer in layers:
        _check_keys(layer)
    merged: Any = {group: _defaults(kind) for group, kind in _GROUPS.items()}
    for layer in layers:
        given = {key: value for key, value in layer.values.items() if value is not None}
        merged = _merged(merged, given, layer.depth)
    tree = OmegaConf.create(merged)
    config = _config(tree, _origins(layers), str(path))
    for group, values in _plain(config).items():
        tree[group] = _escaped(values)  # interpolation in the DAG sees the checked values
    kinds = zip(_DAG_KEYS, (dict, list, list), strict=True)
    return ConfigFile(config, *(_container(_resolved(tree, key, str(path)), kind, key, path) for key, kind in kinds))


def dump(config: Config) -> str:
    """YAML from which ``load`` makes an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(_plain(config))))


def shipped(name: str) -> Path:
    """A config that comes with the package, such as ``quickstart.yaml``. ConfigError lists those there are."""
    there = _shipped()
    path = there.get(name) or there.get(f"{name}.yaml")
    if path is None:
        raise ConfigError(f"no config {name!r} comes with siirl_dask (there are: {sorted(there)})")
    return path


def _shipped() -> dict[str, Path]:
    folder = Path(str(files("siirl_dask").joinpath("configs")))
    return {path.name: path for path in folder.glob("*.yaml")}


def _file_layers(path: Path, chain: tuple[Path, ...] = ()) -> list[_Layer]:
    """The file's base, that one's base ..., then the file."""
    if path.resolve() in chain:
        raise ConfigError(f"{chain[-1]}: base {path} makes a cycle: a file cannot be its own base")
    asked_by = f"{chain[-1]}: base " if chain else ""
    values = _read(path, asked_by)
    base = values.pop("base", None)
    if base is None:
        return [_Layer(str(path), values)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r}: expected the path of another file")
    return [*_file_layers(path.parent / base, (*chain, path.resolve())), _Layer(str(path), values)]


def _read(path: Path, asked_by: str) -> dict[str, Any]:
    """The file's values, interpolations unresolved."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError as error:
        known = _shipped()
        hint = f"; siirl_dask comes with {known[path.name]}" if path.name in known else ""
        raise ConfigError(f"{asked_by}{path}: no such file{hint}") from error
    except MarkedYAMLError as error:
        raise ConfigError(f"{asked_by}{path}{_syntax_error(path, error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{asked_by}{path}: {error.full_key}: {_first_line(error)}") from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{asked_by}{path}: expected a YAML file with groups of values: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{asked_by}{path}: holds a list: expected groups of values ({', '.join(_GROUPS)})")
    return {str(key): value for key, value in loaded.items()}


def _syntax_error(path: Path, error: MarkedYAMLError) -> str:
    """Line and problem, and the likely cause in ``with: {n: ${rollout.n}}``, where the brace ends the mapping."""
    number = error.problem_mark.line if error.problem_mark else 0
    line = "".join(path.read_text().splitlines()[number : number + 1])
    hint = '; within {} and [], write interpolations in quotes: "${...}"' if "${" in line else ""
    return f":{number + 1}: not YAML: {error.problem}{hint}"


def _override(text: str) -> _Layer:
    origin = f"override {text!r}"
    key, separator, _ = text.partition("=")
    top = key.split(".")[0]
    if not separator or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{origin}: expected key=value, such as trainer.lr=2e-6")
    if top in (*_DAG_KEYS, "base"):
        raise ConfigError(f"{origin}: {top!r} is for files only: write a YAML file with 'base:' and its own {top!r}")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
        return _Layer(origin, values, depth=1 + max(1, key.count(".")))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: the value of {key} is not YAML: {_first_line(error)}") from error


def _check_keys(layer: _Layer) -> None:
    for group, values in layer.values.items():
        if group in _DAG_KEYS or (group in _GROUPS and values is None):
            continue
        if group not in _GROUPS:
            valid = [*_GROUPS, *_DAG_KEYS, "base"]
            hint = _elsewhere(group) or did_you_mean(group, valid)
            raise ConfigError(f"{layer.origin}: unknown group {group!r} (groups: {', '.join(valid)}){hint}")
        known = [f.name for f in fields(_GROUPS[group])]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{layer.origin}: {group}={values!r}: expected a mapping with keys of {known}")
        for key in values:
            if key not in known:
                hint = _elsewhere(str(key)) or did_you_mean(str(key), known) or _elsewhere(str(key), cutoff=0.7)
                raise ConfigError(f"{layer.origin}: unknown key '{group}.{key}' (keys of {group}: {known}){hint}")


def _elsewhere(key: str, cutoff: float = 1.0) -> str:
    """A hint to a group that has this key, or one that is spelled nearly so."""
    full = {f.name: f"{group}.{f.name}" for group, kind in reversed([*_GROUPS.items()]) for f in fields(kind)}
    near = get_close_matches(key, full, n=1, cutoff=cutoff)
    return f"; did you mean {full[near[0]]!r}?" if near else ""


def _merged(old: Any, new: Any, depth: int) -> Any:
    if depth and isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value, depth - 1) for key, value in new.items()}
    return new


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """As written on the class: unlike an instance's, they still hold their interpolations."""
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return _plain({f.name: made.get(f.name, f.default) for f in fields(kind)})  # type: ignore[no-any-return]


def _config(tree: DictConfig, origins: Mapping[str, str], path: str) -> Config:
    raw: dict[str, Any] = {group: OmegaConf.to_container(tree[group], resolve=False) for group in _GROUPS}
    if missing := [f"{group}.{key}" for group, inner in raw.items() for key, value in inner.items() if value == "???"]:
        raise ConfigError(f"{path}: {', '.join(missing)}: a value is needed; write it there, or add {missing[0]}=...")
    groups = {}
    for group, kind in _GROUPS.items():
        hints, values = get_type_hints(kind), _resolved(tree, group, path)
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


def _resolved(tree: DictConfig, key: str, path: str) -> Any:
    """The part of the tree under ``key`` as plain data, None when there is none."""
    part = tree.get(key)
    try:
        return OmegaConf.to_container(part, resolve=True, throw_on_missing=True) if OmegaConf.is_config(part) else part
    except (OmegaConfBaseException, RecursionError) as error:
        given = getattr(error, "full_key", None) or key
        hint = ""
        if isinstance(error, InterpolationKeyError) and (wanted := re.search(r"'(.*)'", str(error))):
            everything = [f"{group}.{f.name}" for group, kind in _GROUPS.items() for f in fields(kind)]
            hint = _elsewhere(wanted[1].split(".")[-1]) or did_you_mean(wanted[1], everything)
        text = "its interpolation never ends" if isinstance(error, RecursionError) else _first_line(error)
        raise ConfigError(f"{path}: {given}: {text}{hint}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type of a config field. ConfigError names what was expected."""
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


def _container(value: Any, kind: type[Any], key: str, path: object) -> Any:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{path}: {key}={value!r}: expected a {'list' if kind is list else 'mapping by role name'}")
    return value or kind()


def _origins(layers: Sequence[_Layer]) -> dict[str, str]:
    """Where each ``group.key`` was given last."""
    given = ((layer.origin, group, inner) for layer in layers for group, inner in layer.values.items())
    return {f"{group}.{key}": origin for origin, group, inner in given if isinstance(inner, dict) for key in inner}


def _plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as what YAML has."""
    match value:
        case Config():
            return _plain(asdict(value))
        case StrEnum():
            return value.value
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def _escaped(value: Any) -> Any:
    """Plain data with ``${`` written so that OmegaConf takes it literally."""
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
        case Mapping():
            return {key: _escaped(item) for key, item in value.items()}
        case list():
            return [_escaped(item) for item in value]
    return value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
