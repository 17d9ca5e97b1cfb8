"""Reads the layers of a configuration (bases, file, overrides) and the lines of their roles and
nodes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache, reduce
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from siirl_dask.coerce import field_types
from siirl_dask.config import AgentConfig, Config
from siirl_dask.config.file.written import LOADER, as_written, hint_below, is_text
from siirl_dask.errors import ConfigError, did_you_mean

_HINTS: Mapping[str, type[Any]] = field_types(Config)
GROUPS = {key: kind for key, kind in _HINTS.items() if is_dataclass(cast("object", kind))}
SHIPPED = "siirl_dask:"
"""Beginning of a base that comes with the package, as in ``siirl_dask:dags/grpo.yaml``."""
AGENTS = "agents"
"""The group whose keys are names of agents."""
_YAML_TEXT = re.compile(r"""\s*(["'].*|null|~)?\s*$""", re.DOTALL)  # quoted, or no text at all
_LISTS = ("nodes", "validation_nodes")
_DAG_KEYS = ("roles", *_LISTS)
RENAMED = {
    "observe.tensorboard": "observe.backends",
    "rollout.weights_by": "rollout.weight_sync",
    "rollout.weights_bucket": "rollout.weight_bucket",
    "rollout.ahead": "rollout.steps_ahead",
    "rollout.expected_length": "rollout.expected_length_column",
    "rollout.rows": "rollout.prompt_placement",
    "trainer.lora_rank": "trainer.lora.rank",
    "trainer.lora_alpha": "trainer.lora.alpha",
    "trainer.lora_targets": "trainer.lora.targets",
    "validation.source": "validation.source_column",
    "validation.extract": "validation.answer_extractor",
}
"""Keys of earlier versions, with their present names."""
_OTHER_NAMES = {
    "learning_rate": "trainer.lr",
    "max_completion_length": "rollout.max_response_length",
    "max_steps": "run.steps",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.n",
    "output_dir": "run.url",
}
"""Names that other trainers have for keys, which no spelling is near."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Values with their origin. Later layers win."""

    origin: str
    values: Mapping[str, Any]
    depth: int = 2
    """Levels that are merged key by key: groups, and keys within them. A mapping below, such as a
    placement or a role, is a value and replaces the earlier one; ``cluster.placement.policy=[2]``
    goes one level deeper."""
    lines: Mapping[tuple[str, str | int | None], int] = field(default_factory=dict)
    """Lines of keys, roles and nodes, by group or part of the DAG and by name or list index; None
    stands for the part itself."""

    def place(self, part: str, key: str | int | None) -> str:
        """Return file and line, as ``configs/grpo.yaml:42``, for an error."""
        line = self.lines.get((part, key), self.lines.get((part, None)))
        if line is None:
            return self.origin
        return f"{self.origin}:{line}"


def shipped(name: str) -> Path:
    """Return the path of a config that comes with the package, such as ``quickstart.yaml``.
    ConfigError lists all.
    """
    configs = shipped_files()
    path = configs.get(name)
    if path is None:
        path = configs.get(f"{name}.yaml")
    if path is None:
        raise ConfigError(
            f"no config {name!r} comes with siirl_dask (there are: {sorted(configs)})"
            f"{did_you_mean(name, configs)}"
        )
    return path


def path_of(name: str | os.PathLike[str]) -> Path:
    """Return the path of a file, or of the shipped one that ``siirl_dask:NAME`` names. ConfigError
    lists those.
    """
    text = os.fspath(name)
    if text.startswith(SHIPPED):
        return shipped(text.removeprefix(SHIPPED))
    return Path(text)


def shipped_folder() -> Path:
    """Return the folder of the configs that come with the package."""
    return Path(str(files("siirl_dask").joinpath("configs")))


def shipped_files(below: str = "") -> dict[str, Path]:
    """Return the shipped configs by name, or what lies in the folder ``clusters``, which are no
    configs of a run.
    """
    folder = shipped_folder() / below
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.yaml")}
    return {name: path for name, path in paths.items() if not name.startswith("clusters/")}


def file_layers(path: Path, chain: tuple[Path, ...] = (), asked_by: str = "") -> list[Layer]:
    """Return the layers of a file: those of its bases, in order, then its own.

    A base that two of them share counts once, at its first place. ConfigError for a file that is
    missing, not YAML, or a base of itself; it begins with ``asked_by``.
    """
    text = _read(path, asked_by)  # first: a link to itself cannot be resolved, nor read
    if path.resolve() in chain:
        raise ConfigError(f"{chain[-1]}: base {path} makes a cycle: a file cannot be its own base")
    values = _parse(text, str(path), asked_by)
    bases = base_layers(values, str(path), path.parent, (*chain, path.resolve()))
    return [*bases, Layer(str(path), values, lines=_lines(text))]


def base_layers(
    values: dict[str, Any],
    name: str,
    folder: Path,
    chain: tuple[Path, ...],
) -> list[Layer]:
    """Return the layers of the files that ``values`` names as its bases, and take that key out.

    Paths are relative to ``folder``. ``chain`` has the files that lead here. ConfigError, in which
    the values are called ``name``.
    """
    bases = values.pop("base", None)
    if not bases:
        return []
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{name}: base={bases!r}: expected the path of another file, or a list of such"
        )
    asked_by = f"{chain[-1] if chain else name}: base "
    layers: list[Layer] = []
    for base in bases:
        found = path_of(base) if base.startswith(SHIPPED) else folder / base
        inherited = file_layers(found, chain, asked_by)
        known = {Path(layer.origin).resolve() for layer in layers}
        layers += [layer for layer in inherited if Path(layer.origin).resolve() not in known]
    return layers


def text_layer(text: str | bytes, name: str) -> Layer:
    """Return the layer of a YAML text that errors call ``name``. ConfigError if it is not YAML,
    or names a base.
    """
    try:
        if not isinstance(text, str):
            text = text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: expected YAML with groups of values: {error}") from error
    values = _parse(text, name)
    if "base" in values:
        raise ConfigError(
            f"{name}: base={values['base']!r}: only a file that is loaded by its path may name one"
        )
    return Layer(name, values, lines=_lines(text))


def _read(path: Path, asked_by: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{asked_by}{path}: no such file{_near_file(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{asked_by}{path}: expected a YAML file with groups of values: {error}"
        ) from error


def _near_file(path: Path) -> str:
    """Return a hint to the shipped config of that name, or to a file whose name is nearly so."""
    if path.name in shipped_files():
        return f"; siirl_dask comes with {SHIPPED}{path.name}"
    return did_you_mean(str(path), (str(other) for other in path.parent.glob("*.yaml")))


def _parse(text: str, name: str, asked_by: str = "") -> dict[str, Any]:
    """Return the values of a YAML text, interpolations unresolved."""
    try:
        loaded = deepcopy(_plain(text))
    except ConfigError as error:
        raise ConfigError(f"{asked_by}{name}: {error}") from error
    except MarkedYAMLError as error:
        raise ConfigError(f"{asked_by}{name}{_syntax_error(text, error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{asked_by}{name}: {error.full_key}: {first_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{asked_by}{name}: its values are nested too deep to be read: expected groups of values"
        ) from error
    except (OSError, YAMLError) as error:
        raise ConfigError(
            f"{asked_by}{name}: expected a YAML file with groups of values: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{asked_by}{name}: holds a list: expected groups of values ({', '.join(GROUPS)})"
        )
    return {str(key): value for key, value in loaded.items()}


@lru_cache(maxsize=64)
def _plain(text: str) -> Any:
    """Return the values of a YAML text as plain data, of which callers take a copy.

    To read a configuration takes a quarter of the time of loading it, and one process reads the
    shipped ones again and
    again: they are bases of many files.
    """
    values = OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
    return as_written(values, yaml.compose(text, Loader=LOADER), Config)


def _syntax_error(text: str, error: MarkedYAMLError) -> str:
    """Return line and problem, with a hint for ``with: {n: ${rollout.n}}``, where the brace ends
    the mapping.
    """
    number = 0
    if error.problem_mark:
        number = error.problem_mark.line
    line = "".join(text.splitlines()[number : number + 1])
    hint = ""
    if "${" in line:
        hint = '; within {} and [], write interpolations in quotes: "${...}"'
    return f":{number + 1}: not YAML: {error.problem}{hint}"


def override(text: str) -> Layer:
    """Return the layer of ``key=value``. ConfigError for another form, or a key that only a file
    may have.
    """
    origin = f"override {text!r}"
    key, separator, value = text.partition("=")
    top = key.split(".")[0]
    if not separator or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{origin}: expected key=value, such as trainer.lr=2e-6")
    if top in ("roles", "base"):
        raise ConfigError(
            f"{origin}: {top!r} is for files only: write a YAML file with 'base:' and its own "
            f"{top!r}"
        )
    names = key.split(".")
    hint: Any = reduce(hint_below, names, Config)
    if is_text(hint) and not _YAML_TEXT.match(value):
        # to YAML 007 is 7, and 'a #b' is a
        text = f"{key}={json.dumps(value.strip(), ensure_ascii=False)}"
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
        node = yaml.compose(text.partition("=")[2], Loader=LOADER)
        _replace_at(values, names, lambda found: as_written(found, node, hint, key))
        return Layer(origin, values, depth=1 + max(1, key.count(".")))
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(
            f"{origin:.200}: the value of {key} is not YAML: {first_line(error)}"
        ) from error


def _replace_at(values: Any, names: Sequence[str], change: Callable[[Any], Any]) -> None:
    """Change what is at a path of names, if it is there; brackets in a name may lead elsewhere."""
    *before, last = names
    for name in before:
        values = values.get(name) if isinstance(values, dict) else None
    if isinstance(values, dict) and last in values:
        values[last] = change(values[last])


@lru_cache(maxsize=64)
def _lines(text: str) -> Mapping[tuple[str, str | int | None], int]:
    """Return the lines, from 1, of groups and parts of the DAG, and of each key, role and node in
    them.
    """
    root = yaml.compose(text, Loader=LOADER)
    lines: dict[tuple[str, str | int | None], int] = {}
    for key, part in root.value if isinstance(root, yaml.MappingNode) else ():
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
    """Raise ConfigError for an unknown group or key, with the nearest spelling or the key's new
    name.
    """
    for group, values in layer.values.items():
        if group in _DAG_KEYS or (group in (*GROUPS, AGENTS) and values is None):
            continue
        if group == AGENTS:
            _check_agents(layer.origin, values)
            continue
        if group not in GROUPS:
            valid = [*GROUPS, AGENTS, *_DAG_KEYS, "base"]
            hint = _elsewhere(group)
            if not hint:
                hint = did_you_mean(group, valid)
            names = group.split(".")
            if len(names) > 1 and names[0] in valid:
                hint = f"; in a file it is {': {'.join(names)}: ...{'}' * (len(names) - 1)}"
            raise ConfigError(
                f"{layer.origin}: unknown group {group!r} (groups: {', '.join(valid)}){hint}"
            )
        _check_group(layer.origin, group, values, GROUPS[group])


def _check_agents(origin: str, agents: Any) -> None:
    if not isinstance(agents, Mapping):
        raise ConfigError(
            f"{origin}: agents={agents!r}: expected a mapping by name, as in {{a: {{}}, b: {{}}}}"
        )
    for name, own in agents.items():
        if own is not None:
            _check_group(origin, f"{AGENTS}.{name}", own, AgentConfig)


def _check_group(origin: str, group: str, values: Any, kind: type[Any]) -> None:
    hints = field_types(kind)
    known = [f.name for f in fields(kind)]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: {group}={values!r}: expected a mapping with keys of {known}")
    for key, value in values.items():
        if key not in known:
            new = _renamed(f"{group}.{key}")
            if new:
                raise ConfigError(f"{origin}: unknown key '{group}.{key}'{new}")
            hint = _elsewhere(str(key), group)
            if not hint:
                hint = did_you_mean(str(key), known)
            if not hint:
                hint = _elsewhere(str(key), group, cutoff=0.7)
            raise ConfigError(
                f"{origin}: unknown key '{group}.{key}' (keys of {group}: {known}){hint}"
            )
        if is_dataclass(hints[key]):
            _check_group(origin, f"{group}.{key}", value, hints[key])


def config_keys(kind: type[Any] = Config, group: str = "") -> list[str]:
    """Return every key of a configuration (``rollout.n``, ``rollout.vllm.sleep_level``) in the
    order of the groups.
    """
    hints = field_types(kind)
    keys: list[str] = []
    for name in (f.name for f in fields(kind)):
        full = name
        if group:
            full = f"{group}.{name}"
        keys += config_keys(hints[name], full) if is_dataclass(hints[name]) else [full]
    return keys


def key_hint(key: str) -> str:
    """Return a hint to the nearest spelling of ``key`` in any group, for an error."""
    hint = _renamed(key)
    if hint:
        return hint
    hint = _elsewhere(key.rpartition(".")[2])
    if hint:
        return hint
    return did_you_mean(key, config_keys())


def _renamed(key: str) -> str:
    group, _, name = key.partition(".")
    new = RENAMED.get(f"trainer.{name}" if group == "critic" else key)
    if new:
        return f"; it is called '{group}.{new.partition('.')[2]}' now"
    other = _OTHER_NAMES.get(key.rpartition(".")[2])
    if other:
        return f"; did you mean {other!r}?"
    return ""


def _elsewhere(key: str, group: str = "", cutoff: float = 1.0) -> str:
    """Return a hint to a key of another group with this name, or nearly so; keys below ``group``
    come first.
    """
    keys = sorted(config_keys(), key=lambda full: not full.startswith(f"{group}."))
    full = {full.rpartition(".")[2]: full for full in reversed(keys)}
    near = get_close_matches(key, full, n=1, cutoff=cutoff)
    if near:
        return f"; did you mean {full[near[0]]!r}?"
    return ""


def merged(old: Any, new: Any, depth: int, kind: Any = Config) -> Any:
    """Return ``new`` merged over ``old``: key by key down to ``depth``, and in every group of
    the configuration.
    """
    if not ((depth or is_dataclass(kind)) and isinstance(old, dict) and isinstance(new, dict)):
        return new
    hints = {}
    if is_dataclass(kind):
        hints = field_types(kind)
    return old | {
        key: merged(old.get(key), value, max(0, depth - 1), hints.get(key))
        for key, value in new.items()
    }


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]
