"""What lies under ``run.url``: how a run describes itself there, and what of an earlier start is removed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsspec import AbstractFileSystem
from siirl_storage import Conflict, StorageError, join, open_fs, write_atomic, write_exclusive

from siirl_dask import checkpoints
from siirl_dask.config import Config
from siirl_dask.configfile import dump, load
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.planner import DAG, dag_from_spec, dag_to_spec
from siirl_dask.planner.canonical import canonical

CONFIG_FILE, _DAG_FILE = "config.yaml", "dag.json"
_SUMMARY = "summary.json"
_FILES = (_DAG_FILE, _SUMMARY, "metrics.jsonl", "plot.png")
_TEST = "test"  # the table of the test phase
_STEP, _TABLE = re.compile(r"step=(\d{6,})", re.ASCII), re.compile(r"\w[\w-]*")
_MAY_CHANGE = {"cluster", "validation", "observe", "checkpoint"} | {
    "run.name",
    "run.url",
    "run.steps",
    "run.lookahead",
    "data.transport",
    "data.memory_limit",
    "data.spill_directory",
    "rollout.weights_bucket",
    "rollout.weights_by",
    "rollout.tensor_parallel_size",
    "trainer.tensor_parallel",
    "trainer.gather_size",
}
"""Groups and keys that extend or observe a run: what is learned does not depend on them."""
_Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Description:
    """What decides a run's results: its configuration and its training DAG, as plain data."""

    values: Mapping[str, Any]
    """By ``group.key``, without those that may change."""
    dag: _Spec

    @staticmethod
    def of(config: Config, dag: DAG) -> Description:
        return Description(_deciding(config), dag_to_spec(dag))

    def digest(self) -> str:
        text = json.dumps([dict(self.values), self.dag], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: Description) -> list[str]:
        """Each as ``trainer.lr: 1e-06 -> 2e-06``, from this one to the other. A DAG that was not written yet is any."""
        dags = (self.dag, other.dag if self.dag else self.dag)
        leaves = [_leaves(_by_name(dag), "DAG: ") for dag in dags]
        mine, others = ({**one.values, **more} for one, more in zip((self, other), leaves, strict=True))
        free = tuple(f".with.{key}" for key in _MAY_CHANGE)  # as options of a role or node
        names = [name for name in {**mine, **others} if mine.get(name) != others.get(name) and not name.endswith(free)]
        return [f"{name}: {_shown(mine.get(name))} -> {_shown(others.get(name))}" for name in names]


def described(url: str) -> Description | None:
    """Of the run that is at ``url``; None if there is none. ConfigError if it cannot be read."""
    try:
        fs, path = open_fs(url)
        if not fs.exists(f"{path}/{CONFIG_FILE}"):
            return None
        text, dag = fs.cat_file(f"{path}/{CONFIG_FILE}"), _read_dag(fs, path)
    except StorageError as error:
        raise ConfigError(f"run.url={url!r}: {error}") from error
    with TemporaryDirectory() as folder:
        copy = Path(folder, CONFIG_FILE)
        copy.write_bytes(text)
        try:
            config = load(copy).config
        except ConfigError as error:  # it was changed by hand, or written by another version
            raise ConfigError(str(error).replace(str(copy), join(url, CONFIG_FILE))) from error
    return Description(_deciding(config), dag)


def describe(config: Config, dag: DAG, *, again: bool) -> None:
    """Write ``config.yaml`` and ``dag.json``; ``again``: in place of those that are there."""
    fs, path = open_fs(config.run.url)
    text = dump(config).encode()
    try:
        (write_atomic if again else write_exclusive)(fs, f"{path}/{CONFIG_FILE}", text)
    except Conflict as error:
        raise ConfigError(f"run.url={config.run.url!r} was taken by another run in the meantime") from error
    write_atomic(fs, f"{path}/{_DAG_FILE}", (json.dumps(dag_to_spec(dag), indent=2) + "\n").encode())


def tables_of(dags: Iterable[DAG | None]) -> set[str]:
    """Tables that a run keeps: those of its nodes, and that of the test phase."""
    return {_TEST} | {node.keep for dag in dags if dag for node in dag.nodes if node.keep}


def remove_steps(url: str, tables: Iterable[str], done: int) -> None:
    """What was kept of steps after step ``done``, and of the test; with none done, of all of them.

    They are done again, perhaps by other workers: parts of both must not lie side by side.
    """
    for table in tables:
        fs, root = open_fs(join(url, table))
        for path in _listed(fs, root):
            matched = _STEP.fullmatch(path.rpartition("/")[2])
            if matched and (int(matched[1]) > done or not done or table == _TEST):
                fs.rm(path, recursive=True)


def remove_summary(url: str) -> None:
    """It tells how the run ended, and the run goes on."""
    fs, path = open_fs(join(url, _SUMMARY))
    if fs.exists(path):
        fs.rm_file(path)


def remove_run(url: str, tables: Iterable[str]) -> None:
    """All that a run writes, and nothing else. Its checkpoints go first and its ``config.yaml`` last: until then there
    is a run here, which can be gone on with or removed again.
    """
    fs, path = open_fs(url)
    checkpoints.remove_all(url)
    remove_steps(url, {*tables, *_kept_before(fs, path)}, 0)
    events = [file for file in _listed(fs, f"{path}/tensorboard") if "events.out.tfevents" in file]
    for file in (*events, *(f"{path}/{name}" for name in (*_FILES, CONFIG_FILE))):
        if fs.exists(file):
            fs.rm_file(file)


def _kept_before(fs: AbstractFileSystem, path: str) -> set[str]:
    try:
        names = {node.get("keep") for node in _read_dag(fs, path).get("nodes", ())}
    except ConfigError:
        return set()  # a damaged file is removed like a whole one, and tells of no tables
    return {name for name in names if isinstance(name, str) and _TABLE.fullmatch(name)}


def _read_dag(fs: AbstractFileSystem, path: str) -> _Spec:
    """Empty where a start was killed before it wrote it. Options that it does not have yet are given their defaults."""
    if not fs.exists(f"{path}/{_DAG_FILE}"):
        return {}
    try:
        spec: _Spec = json.loads(fs.cat_file(f"{path}/{_DAG_FILE}"))
        roles, nodes = dict(spec["roles"]), [dict(node) for node in spec["nodes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}/{_DAG_FILE} is not a run's DAG: {type(error).__name__}: {error}") from error
    try:
        return dag_to_spec(dag_from_spec(roles, nodes))
    except PlanError:
        return spec  # it was of functions that are no more: a difference like any other


def _deciding(config: Config) -> dict[str, Any]:
    groups: Mapping[str, Mapping[str, Any]] = canonical(config)
    return {
        f"{group}.{key}": value
        for group, values in groups.items()
        for key, value in values.items()
        if group not in _MAY_CHANGE and f"{group}.{key}" not in _MAY_CHANGE
    }


def _by_name(dag: _Spec) -> dict[str, Any]:
    nodes = {node["name"]: node for node in dag.get("nodes", ())}
    return {"roles": dag.get("roles", {}), "nodes": nodes, "order": list(nodes)}


def _leaves(value: Any, before: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {before.rstrip("."): value}
    inner = (_leaves(item, f"{before}{key}.") for key, item in value.items())
    return {name: leaf for leaves in inner for name, leaf in leaves.items()}


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _listed(fs: AbstractFileSystem, folder: str) -> list[str]:
    try:
        return [str(path).rstrip("/") for path in fs.ls(folder, detail=False)]
    except FileNotFoundError:
        return []
