"""The layers of a configuration: a file's bases, the file, overrides; and the lines at which its nodes are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError, did_you_mean

GROUPS: Mapping[str, type[Any]] = get_type_hints(Config)
_LISTS = ("nodes", "validation_nodes")
_DAG_KEYS = ("roles", *_LISTS)


@dataclass(frozen=True, slots=True)
class Layer:
    """Values and where they come from. Later layers win."""

    origin: str
    values: Mapping[str, Any]
    depth: int = 2
    """Levels that are merged key by key: groups and their keys. A mapping below (a placement, a role) is a value, and
    replaces the earlier one; ``cluster.placement.policy=[2]`` goes one level deeper."""
    lines: Mapping[tuple[str, str | int | None], int] = field(default_factory=dict)
    """Where roles and nodes are written, by part of the DAG and name, or place in a list; None stands for the part."""

    def place(self, part: str, key: str | int | None) -> str:
        """``configs/grpo.yaml:42``, for an error."""
        line = self.lines.get((part, key), self.lines.get((part, None)))
        return self.origin if line is None else f"{self.origin}:{line}"


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


def file_layers(path: Path, chain: tuple[Path, ...] = ()) -> list[Layer]:
    """The file's base, that one's base ..., then the file."""
    if path.resolve() in chain:
        raise ConfigError(f"{chain[-1]}: base {path} makes a cycle: a file cannot be its own base")
    asked_by = f"{chain[-1]}: base " if chain else ""
    values = _read(path, asked_by)
    base = values.pop("base", None)
    layer = Layer(str(path), values, lines=_lines(path.read_text()))
    if base is None:
        return [layer]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r}: expected the path of another file")
    return [*file_layers(path.parent / base, (*chain, path.resolve())), layer]


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
        raise ConfigError(f"{asked_by}{path}: {error.full_key}: {first_line(error)}") from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{asked_by}{path}: expected a YAML file with groups of values: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{asked_by}{path}: holds a list: expected groups of values ({', '.join(GROUPS)})")
    return {str(key): value for key, value in loaded.items()}


def _syntax_error(path: Path, error: MarkedYAMLError) -> str:
    """Line and problem, and the likely cause in ``with: {n: ${rollout.n}}``, where the brace ends the mapping."""
    number = error.problem_mark.line if error.problem_mark else 0
    line = "".join(path.read_text().splitlines()[number : number + 1])
    hint = '; within {} and [], write interpolations in quotes: "${...}"' if "${" in line else ""
    return f":{number + 1}: not YAML: {error.problem}{hint}"


def override(text: str) -> Layer:
    origin = f"override {text!r}"
    key, separator, _ = text.partition("=")
    top = key.split(".")[0]
    if not separator or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{origin}: expected key=value, such as trainer.lr=2e-6")
    if top in ("roles", "base"):
        raise ConfigError(f"{origin}: {top!r} is for files only: write a YAML file with 'base:' and its own {top!r}")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
        return Layer(origin, values, depth=1 + max(1, key.count(".")))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: the value of {key} is not YAML: {first_line(error)}") from error


def _lines(text: str) -> dict[tuple[str, str | int | None], int]:
    """Lines, from 1, of the parts of the DAG, and of each role and node in them."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    lines: dict[tuple[str, str | int | None], int] = {}
    for key, part in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value in _DAG_KEYS:
            lines[key.value, None] = _line(key)
            lines |= {(key.value, name): line for name, line in _lines_within(part).items()}
    return lines


def _lines_within(part: yaml.Node) -> dict[str | int, int]:
    match part:
        case yaml.SequenceNode():
            return {place: _line(item) for place, item in enumerate(part.value)}
        case yaml.MappingNode():
            merged: dict[str | int, int] = {}
            for key, value in part.value:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    merged |= _lines_within(source) if key.value == "<<" else {}
            return merged | {key.value: _line(key) for key, _ in part.value if key.value != "<<"}
    return {}


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def check_keys(layer: Layer) -> None:
    for group, values in layer.values.items():
        if group in _DAG_KEYS or (group in GROUPS and values is None):
            continue
        if group not in GROUPS:
            valid = [*GROUPS, *_DAG_KEYS, "base"]
            hint = elsewhere(group) or did_you_mean(group, valid)
            raise ConfigError(f"{layer.origin}: unknown group {group!r} (groups: {', '.join(valid)}){hint}")
        known = [f.name for f in fields(GROUPS[group])]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{layer.origin}: {group}={values!r}: expected a mapping with keys of {known}")
        for key in values:
            if key not in known:
                hint = elsewhere(str(key)) or did_you_mean(str(key), known) or elsewhere(str(key), cutoff=0.7)
                raise ConfigError(f"{layer.origin}: unknown key '{group}.{key}' (keys of {group}: {known}){hint}")


def elsewhere(key: str, cutoff: float = 1.0) -> str:
    """A hint to a group that has this key, or one that is spelled nearly so."""
    full = {f.name: f"{group}.{f.name}" for group, kind in reversed([*GROUPS.items()]) for f in fields(kind)}
    near = get_close_matches(key, full, n=1, cutoff=cutoff)
    return f"; did you mean {full[near[0]]!r}?" if near else ""


def merged(old: Any, new: Any, depth: int) -> Any:
    if depth and isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old.get(key), value, depth - 1) for key, value in new.items()}
    return new


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
