"""What a run wrote down of itself: its configuration, and what scored its samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from siirl_storage import StorageError, join, open_fs

from siirl_dask.checkpoints import committed
from siirl_dask.config import Config
from siirl_dask.configfile import load
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.planner import resolve
from siirl_dask.planner.spec import bind
from siirl_dask.runfolder import CONFIG_FILE

_SCORER = "siirl_dask.rewards.scorer:build_scorer"
_SCORE = ("siirl_dask.nodes.reward:score", "siirl_dask.nodes.dynamic_sampling:sample_mixed_groups")


@dataclass(frozen=True, slots=True)
class Scoring:
    """The reward function of a run, its options bound, and the columns that it gets besides."""

    reward: Callable[..., Any]
    columns: tuple[str, ...] = ()


def is_run(url: str) -> bool:
    """Whether there is a run at ``url``. ConfigError for a URL that cannot be opened."""
    return _read(url, CONFIG_FILE) is not None


def recorded_config(url: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of the run at ``url``. ConfigError when there is none."""
    text = _read(url, CONFIG_FILE)
    if text is None:
        raise ConfigError(f"{url!r} holds no run: expected a folder with a {CONFIG_FILE}")
    return loaded(text, join(url, CONFIG_FILE), overrides)


def loaded(text: bytes, name: str, overrides: Sequence[str]) -> Config:
    """YAML that lies somewhere, as ``name``, with overrides."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG_FILE
        path.write_bytes(text)
        try:
            return load(path, overrides).config
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), name)) from error


def recorded_step(url: str, step: int | None) -> int:
    """``step``, or that of the newest checkpoint. ConfigError when the run has no such checkpoint."""
    there = committed(url)
    if not there:
        raise ConfigError(f"run {url!r} has no checkpoint: none was whole when it ended (checkpoint.every)")
    if step is not None and step not in there:
        raise ConfigError(f"run {url!r} has no checkpoint of step {step} (there are: {there})")
    return there[-1] if step is None else step


def recorded_scoring(url: str) -> Scoring:
    """What the run's DAG scores with. ConfigError when that is no reward function that can be found here."""
    text = _read(url, "dag.json")
    spec = json.loads(text) if text is not None else {"roles": {}, "nodes": []}
    role = next((role for role in spec["roles"].values() if role["build"] == _SCORER), None)
    if role is None:
        raise ConfigError(f"the DAG of run {url!r} has no reward function: name one with --reward module:function")
    columns = [node["with"].get("columns", ()) for node in spec["nodes"] if node["run"] in _SCORE]
    try:
        scorer = bind(resolve(_SCORER), role["with"], "the run's reward")
    except PlanError as error:
        raise ConfigError(f"the reward function of run {url!r} is not here: {error}; name one with --reward") from error
    return Scoring(scorer.keywords["reward"], tuple(*columns[:1]))  # type: ignore[attr-defined]


def _read(url: str, name: str) -> bytes | None:
    try:
        fs, path = open_fs(join(url, name))
    except StorageError as error:
        raise ConfigError(str(error)) from error
    try:
        content: bytes = fs.cat_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content
