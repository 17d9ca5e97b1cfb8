"""Reads what was given: a verl or siiRL configuration, a command line, or a shell script that
has one, in each of the ways that the script may go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from siirl_dask.commands.migrate.shell import ShellCall, ShellOption, read_script
from siirl_dask.config.file import foreign_value, foreign_values
from siirl_dask.config.file.layers import GROUPS
from siirl_dask.errors import ConfigError, clause, did_you_mean

_PARTS = (
    "data", "actor_rollout_ref", "critic", "algorithm", "trainer", "reward_model", "reward", "custom_reward_function",
    "dag", "profiler", "global_profiler", "ray_kwargs", "ray_init", "transfer_queue", "hydra", "distillation",
    "sandbox_fusion", "skip", "async_training", "rollout", "defaults", "model_engine",
)  # fmt: skip
"""Groups of both systems."""
_SURE = ("actor_rollout_ref", "reward_model", "custom_reward_function")
"""Groups that no other trainer has."""
_SIIRL = re.compile(r"dag\.|profiler\.|algorithm\.(algorithm_name|workflow_type)$")
_PPO_PROGRAM = re.compile(
    r"siirl.*|(verl\.trainer|.*\.partial_rollout|.*\.transfer_queue|.*one_step_off_policy)\.main_ppo(_sync)?"
    r"|recipe\.dapo\.main_dapo|.*fully_async_(policy\.fully_async_)?main|verl|recipe"
)
"""Programs whose algorithm is what their options say; another one has code of its own."""
_ONE_STEP = re.compile(r".*one_step_off")
_FULLY_ASYNC = re.compile(r".*fully_async")
_OTHER_PROGRAM = re.compile(r"sft|main_eval|main_generation")
"""Parts of the names of verl's other programs: supervised training, scoring, sampling."""
_CONFIG_FILE = re.compile(r"--config-(name|path|dir)(?==|$)|-c[npd]$")
_THEIR_CONFIGS = (
    *("ppo_trainer", "ppo_megatron_trainer"),
    *("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"),
    *("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer"),
    *("config", "./config"),
)
"""YAML files that come with verl, whose values are the defaults of the table, and their folder."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_EXPECTED = (
    "expected a YAML file with groups such as actor_rollout_ref and trainer, a shell script with "
    "`python -m verl.trainer.main_ppo key=value ...` or `python -m siirl.main_dag key=value ...`, "
    "or such key=value after --"
)


@dataclass(frozen=True, slots=True)
class Given:
    """Options by name, with dots: ``actor_rollout_ref.actor.optim.lr``. Keys that a caller
    removed are not there.
    """

    system: str
    """``verl`` or ``siiRL``, as far as the names tell."""
    values: Mapping[str, Any]
    origin: str
    """File or command line, for the heading of what comes of it."""
    notes: Sequence[str] = field(default_factory=tuple)
    """Remarks on the reading, such as a variable that the script does not set."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of the script where options got their values."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Parts of options' values that are not known: mostly commands, whose output they take."""
    assumed: str = ""
    """Assumption where a script does not tell: ``DEVICE=gpu``."""
    questions: Sequence[str] = field(default_factory=tuple)
    """Sentences on what decides between the ways of a script."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """Keys of ours that code of the script may change, which is not read, with the reason."""
    engine: str = "fsdp"
    """Backend that trains where no ``strategy`` is given: that of the chosen YAML file."""
    ahead: str = ""
    """``one_step`` or ``fully_async`` where verl's program generates ahead of training."""


def read_given(words: Sequence[str]) -> list[Given]:
    """Read a file, changed by the ``key=value`` after it, or a command line alone. ConfigError for
    anything else.

    Of a script, each way that it may go is one. ``NAME=value``, without a dot, is a variable of
    the shell script.
    """
    if not words:
        raise ConfigError(f"nothing is given: {_EXPECTED}")
    variables = dict(word.split("=", 1) for word in words if _is_variable(word))
    if "=" in words[0] or words[0].startswith("python"):
        options = [ShellOption(word, 0) for word in words if not _is_variable(word)]
        return [_from_call(ShellCall(options, _module(words)), [], "the command line")]
    path = Path(words[0])
    more = [word for word in words[1:] if not _is_variable(word)]
    text = _read(path)
    if path.suffix in (".yaml", ".yml"):
        return [_from_yaml(text, path, more)]
    script = read_script(text, str(path), variables)
    return [
        replace(given, questions=[*script.questions, *given.questions])
        for given in (_from_call(way, more, str(path)) for way in script.ways)
    ]


def _is_variable(word: str) -> bool:
    """Whether a word sets a variable of a shell script: its name has no dot, and is no group's."""
    if _VARIABLE.fullmatch(word) is None:
        return False
    return word.partition("=")[0] not in _PARTS


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {clause(error)}: {_EXPECTED}") from error


def _from_yaml(text: str, path: Path, more: Sequence[str]) -> Given:
    tree = foreign_values(text, str(path))
    if not set(tree) & set(_SURE):
        ours = [
            group
            for group in tree
            if group in {*GROUPS, "base", "roles", "nodes"} - {"data", "critic", "trainer"}
        ]
        hint = ""
        if ours:
            hint = " (it looks like a configuration of siirl_dask already: siirl-dask plan)"
        listed = "nothing"
        if tree:
            listed = ", ".join(map(str, tree))
        raise ConfigError(f"{path}: neither verl's nor siiRL's{hint}: it has {listed}; {_EXPECTED}")
    values = _flat(tree)
    _override(values, more)
    return Given(
        _system(values, ""),
        values,
        str(path),
        engine=_engine(values, ()),
        ahead=_ahead(values, ""),
    )


def _from_call(call: ShellCall, more: Sequence[str], origin: str) -> Given:
    """Return the options of a call. ConfigError for one that trains by no reinforcement learning,
    and for one without an option that is known.
    """
    if _OTHER_PROGRAM.search(call.module):
        raise ConfigError(
            f"{origin}: it calls {call.module}, which is no reinforcement learning: expected "
            "verl.trainer.main_ppo, siirl.main_dag or a recipe of theirs"
        )
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    unread: dict[str, str] = {}
    notes = list(call.notes)
    words = [*call.options, *(ShellOption(word, 0) for word in more)]
    configs = _config_files([option.text for option in words])
    for option in words:
        if option.text in configs:
            continue
        notes += _override(values, [option.text])
        name = option.text.partition("=")[0].lstrip("+")
        for changed in [one for one in values if one == name or one.startswith(f"{name}.")]:
            lines[changed] = option.line
            unread.pop(changed, None)
            if option.unread:
                unread[changed] = option.unread
    if not any(name.partition(".")[0] in _PARTS for name in values):
        hint = "".join(did_you_mean(name.partition(".")[0], _PARTS) for name in [*values][:1])
        raise ConfigError(f"{origin}: no option of verl or siiRL{hint}: {_EXPECTED}")
    questions = _config_questions(configs)
    if configs and not questions:
        notes.append(f"{' '.join(configs)}: comes with verl; its defaults are those of the table")
    notes += [
        f"{name}={values[name]}: what `{source}` prints is not known; write the value"
        for name, source in unread.items()
    ]
    return Given(
        _system(values, call.module),
        values,
        origin,
        notes,
        lines=lines,
        unread=unread,
        assumed=call.assumed,
        questions=questions,
        undecided=_undecided(call.module),
        engine=_engine(values, configs),
        ahead=_ahead(values, call.module),
    )


def _undecided(module: str) -> dict[str, str]:
    """Return what a program that has an algorithm of its own leaves to a person."""
    if not module or _PPO_PROGRAM.fullmatch(module):
        return {}
    reason = (
        f"{module} is a program of its own, whose code is not read: write a loss that learns the "
        "same (docs/algorithms.md), and compare the advantage and the reward"
    )
    return {"algorithm.loss": reason}


def _engine(values: Mapping[str, Any], configs: Sequence[str]) -> str:
    """Return the backend that trains where no strategy is given."""
    chosen = values.get("model_engine", values.get("actor_rollout_ref.actor.model_engine"))
    if chosen is not None:
        return {"dp": "fsdp"}.get(str(chosen), str(chosen))
    if any("megatron" in word for word in configs):
        return "megatron"
    return "fsdp"


def _ahead(values: Mapping[str, Any], module: str) -> str:
    """Return in which way generation runs ahead of training; "" where it does not."""
    if _FULLY_ASYNC.match(module) or any(name.startswith("async_training.") for name in values):
        return "fully_async"
    if _ONE_STEP.match(module) or {"rollout.nnodes", "rollout.n_gpus_per_node"} & set(values):
        return "one_step"
    return ""


def _config_files(words: Sequence[str]) -> list[str]:
    """Return the words that choose a YAML file of theirs: ``--config-name=my``, ``-cn my``."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if _CONFIG_FILE.match(word):
            found.append(word)
        if _CONFIG_FILE.fullmatch(word):
            found += islice(rest, 1)  # the name is a word of its own
    return found


def _config_questions(words: Sequence[str]) -> list[str]:
    """Return a sentence on a YAML file of the user's own, whose values are not read."""
    names = [word.rpartition("=")[2].removesuffix(".yaml") for word in words]
    if all(name in _THEIR_CONFIGS or _CONFIG_FILE.fullmatch(name) for name in names):
        return []
    return [
        f"{' '.join(words)}: the options in that YAML file are not read, and count below those of "
        "the command line: give them after the file, as key=value, or migrate that file"
    ]


def _override(values: dict[str, Any], words: Sequence[str]) -> list[str]:
    """Apply Hydra's ``key=value``, ``+key=value``, ``++key=value`` and ``~key``; return notes on
    other words.
    """
    notes = []
    for word in words:
        name, separator, text = word.partition("=")
        name = name.lstrip("+")
        if word.startswith("~"):
            name = name.lstrip("~")
            removed = [key for key in values if key == name or key.startswith(f"{name}.")]
            for key in removed:
                del values[key]
            if not removed:
                notes.append(f"{word}: takes a default of theirs out, and those are not read here")
        elif separator and re.fullmatch(r"[\w.@/-]+", name) and not name.startswith("-"):
            values |= _flat({name: foreign_value(text)})
        elif word not in ("python", "python3", "-m", "-u") and not re.fullmatch(
            r"(verl|siirl|recipe)[\w./]*", word
        ):
            notes.append(f"{word!r} is no option")
    return notes


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their names with dots; those of Hydra's own use
    are left out.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{name}.")
        elif str(key) != "_target_":
            flat[name] = value
    return flat


def _module(words: Sequence[str]) -> str:
    return next((word for word in words if re.fullmatch(r"(verl|siirl|recipe)[\w./]*", word)), "")


def _system(values: Mapping[str, Any], module: str) -> str:
    is_siirl = "siirl" in module
    if not module:
        is_siirl = any(_SIIRL.match(name) for name in values)
    if is_siirl:
        return "siiRL"
    return "verl"
