"""Reads what was given of TRL: a script, a YAML file, or a command line that starts either."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from siirl_dask.commands.migrate.given import Given
from siirl_dask.commands.migrate.trl.script import TrlScript, read_trl_script
from siirl_dask.config.file import foreign_value, foreign_values
from siirl_dask.errors import ConfigError, clause

_LAUNCHERS = ("trl", "accelerate", "torchrun", "deepspeed")
_NO_SCRIPT = re.compile(r"(.*/)?main_\w+\.py|\+{0,2}\w+\.[\w.]+=.*")
"""A script of verl's, and one of its options, such as custom_reward_function.path=mine.py."""
_KNOWN = (
    "num_generations", "max_completion_length", "model_name_or_path", "reward_funcs", "per_device_train_batch_size",
    "gradient_accumulation_steps", "learning_rate", "dataset_name", "num_train_epochs", "use_vllm", "max_steps",
    "loss_type", "output_dir", "beta",
)  # fmt: skip
"""Keys by which a YAML file is known as one of TRL's."""
_PROCESSES = {"num_processes": "", "nproc_per_node": "nnodes", "num_gpus": "num_nodes"}
"""Options of launchers that count processes, and those that count the hosts of as many each."""
_LAUNCH_FILES = ("config_file", "accelerate_config")
"""Options that name a YAML file of accelerate's."""
_SHIPPED_FILES = dict.fromkeys(("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu"), 8)
_SHIPPED_FILES |= {"single_gpu": 1}
"""Files of accelerate's that come with TRL, by name, and the processes of each."""
_STOCK_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def is_trl(words: Sequence[str]) -> bool:
    """Return whether words are a script, a YAML file or a command line of TRL's."""
    if not words:
        return False
    if words[0] in _LAUNCHERS:
        return True
    if any(word.endswith(".py") and not _NO_SCRIPT.fullmatch(word) for word in words[:3]):
        return True
    path = Path(words[0])
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    try:
        keys = foreign_values(path.read_text(encoding="utf-8"), str(path)).keys()
    except (OSError, UnicodeDecodeError, ConfigError):
        return False
    if "actor_rollout_ref" in keys:
        return False
    return len(keys & set(_KNOWN)) > 1


def read_trl(words: Sequence[str]) -> Given:
    """Return the options of words. ConfigError for a file that is not there, or has no trainer."""
    if Path(words[0]).suffix in (".yaml", ".yml"):
        values = _yaml(Path(words[0])) | _arguments(words[1:])
        return _stock(_with_processes(values, {}), words[0])
    place = _place_of_script(words)
    launcher = _arguments(words[:place])
    values = _arguments(words[place + 1 :])
    config = values.pop("config", None)
    if config is not None:
        values = _yaml(Path(str(config))) | values
    values = _with_processes(values, launcher)
    if words[place] == "grpo":
        return _stock(values, "the command line")
    path = Path(words[place])
    script = read_trl_script(_read(path), str(path), values)
    for name, value in values.items():
        if name == "num_processes" or (place == 0 and words[1:]):
            script.put(name, value, 0)
            script.unread.pop(name, None)
    return _given(script, str(path))


def _with_processes(values: Mapping[str, Any], launcher: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the number of processes that a launcher starts on all hosts, by its
    options or else by its YAML file; without one where neither tells.
    """
    found = dict(values)
    file = next((launcher[one] for one in _LAUNCH_FILES if one in launcher), None)
    for name in _LAUNCH_FILES:
        file = found.pop(name, file)
    counts = [(name, hosts) for name, hosts in _PROCESSES.items() if name in launcher]
    if counts:
        name, hosts = counts[-1]
        number = launcher[name]
        several = launcher.get(hosts, 1)
        found["num_processes"] = f"{number} x {several}"
        if isinstance(number, int) and isinstance(several, int):
            found["num_processes"] = number * several
    elif file is not None and "num_processes" not in found:
        number = _SHIPPED_FILES.get(str(file))
        if number is None and Path(str(file)).is_file():
            number = _yaml(Path(str(file))).get("num_processes")
        found["num_processes"] = f"that of {file}" if number is None else number
    return found


def _place_of_script(words: Sequence[str]) -> int:
    for place, word in enumerate(words):
        if word.endswith(".py") or (word == "grpo" and place and words[place - 1] == "trl"):
            return place
    raise ConfigError(
        f"{' '.join(words[:4])}: expected `trl grpo --config FILE.yaml`, or a launcher with a "
        "script that has a GRPOTrainer"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {clause(error)}: expected a script or a YAML file of TRL's"
        ) from error


def _yaml(path: Path) -> dict[str, Any]:
    return dict(foreign_values(_read(path), str(path)))


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return options of a command line: ``--name value ...``, ``--name=value``, ``--flag`` and
    ``name=value``.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if separator else []
        elif not name and re.match(r"\w+=", word):
            key, _, value = word.partition("=")
            found[key] = [value]
        elif name:
            found[name].append(word)
    values: dict[str, Any] = {}
    for key, texts in found.items():
        read = [foreign_value(text) for text in texts]
        if not read and key.startswith("no_"):
            values[key.removeprefix("no_")] = False
        elif len(read) > 1:
            values[key] = read
        else:
            values[key] = True
            if read:
                values[key] = read[0]
    return values


def _stock(values: Mapping[str, Any], origin: str) -> Given:
    """Return the options of TRL's own script, which ``trl grpo`` runs."""
    script = TrlScript()
    for name, value in values.items():
        script.put(name, value, 0)
    rewards = values.get("reward_funcs", [])
    names = rewards
    if not isinstance(rewards, list):
        names = [rewards]
    script.values["reward_funcs"] = [_stock_reward(str(name)) for name in names]
    if any("accuracy" in str(name) for name in names):
        script.columns.append("solution")
    return _given(script, origin)


def _stock_reward(name: str) -> str:
    if name in _STOCK_REWARDS:
        return f"trl.rewards:{name}"
    module, _, function = name.rpartition(".")
    return f"{module}:{function}"


def _given(script: TrlScript, origin: str) -> Given:
    values = dict(script.values)
    for theirs, ours in (("model_name_or_path", "model"), ("dataset_name", "train_dataset")):
        if theirs in values and ours not in values:
            values[ours] = values.pop(theirs)
    if script.columns:
        values["reward_columns"] = [*dict.fromkeys(script.columns)]
    notes = [*script.notes]
    notes += [f"{name}: {source} is not known" for name, source in script.unread.items()]
    return Given(
        "TRL",
        values,
        origin,
        notes,
        lines=script.lines,
        unread=script.unread,
        questions=script.questions,
        undecided=script.undecided,
    )
