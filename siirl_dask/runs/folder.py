"""The folder at ``run.url``: writes and compares a run's identity, and removes what an earlier
start left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import (
    Conflict,
    FileDigest,
    StorageError,
    join,
    open_fs,
    remove_file,
    remove_tree,
    write_atomic,
    write_exclusive,
)
from siirl_storage.files import absolute

from siirl_dask.config import LAYOUT_GROUPS, Config
from siirl_dask.config.file import Interpolated, dump, load_recorded
from siirl_dask.config.file.layers import config_keys
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.planner import DAG, NONFINITE, STAGES, canonical, dag_from_spec, dag_to_spec
from siirl_dask.runs import checkpoints
from siirl_dask.runs.identity_file import FILE as IDENTITY
from siirl_dask.runs.identity_file import (
    RETENTION,
    DataVersion,
    DueTable,
    IdentityFile,
    ModelVersion,
    Relocation,
    read_identity_file,
    relocation_of,
    with_recorded_data,
)
from siirl_dask.runs.tables import REPLAY, listed, remove_steps
from siirl_dask.wording import redacted

CONFIG_FILE = "config.yaml"
DAG_FILE = "dag.json"
_SUMMARY = "summary.json"
_PLOTS = ("plot.svg", "plot.png")  # a PNG in runs of version 0.1
_FILES = (
    IDENTITY,
    RETENTION,
    DAG_FILE,
    _SUMMARY,
    "metrics.jsonl",
    "metrics.parquet",
    *_PLOTS,
    "tracking.json",
)
_PROFILE = re.compile(r"profile/step=\d{6}/[\w.-]+\.json\.gz")
_TABLE = re.compile(r"\w[\w-]*")
_MAY_CHANGE = {
    "cluster",
    "validation",
    "observe",
    "profile",
    "checkpoint",
    "storage",
    *LAYOUT_GROUPS,
} | {
    "run.name",
    "run.url",
    "run.steps",
    "run.lookahead",
    "run.overlap",
    "run.keep_stages",
    "run.lease",
    "run.max_restarts",
    "run.grace",
    "run.on_nan",
    "run.node_timeout",
    "data.transport",
    "data.port",
    "data.prefetch",
    "data.memory_limit",
    "data.read_limit",
    "data.spill_directory",
    "rollout.weight_bucket",
    "rollout.weight_sync",
    "rollout.server",
    "rollout.process",
    "rollout.tensor_parallel_size",
    "trainer.fsdp.tensor_parallel",
    "trainer.fsdp.gather_size",
    "trainer.max_skipped_steps",
    "critic.max_skipped_steps",
}
"""Groups and keys that may differ when a run is resumed: what is learned does not depend on
them."""
_LONGEST_ROW = ".model.longest_row"
_Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The part of a run that decides its results: configuration and training DAG, as plain data
    without secrets.
    """

    values: Mapping[str, Any]
    """Configuration values by ``group.key``, without those that may change."""
    dag: _Spec
    """The training DAG; empty where the start was killed before it wrote one."""

    @staticmethod
    def of(config: Config, dag: DAG) -> RunIdentity:
        """Return the identity of a run of ``dag`` under ``config``."""
        return RunIdentity(_deciding(config), redacted(_deciding_nodes(dag_to_spec(dag))))

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are equal for equal identities."""
        text = json.dumps([dict(self.values), self.dag], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: RunIdentity, moved: Relocation | None = None) -> list[str]:
        """Return the changes from this identity to ``other``, each as ``run.seed: 0 -> 1``.

        With ``moved``, how the run's folder was moved since, places that are the same as seen from
        it are no change. A DAG or a longest row that was not recorded yet equals any: the row
        follows from keys that are compared.
        """
        dags = (self.dag, other.dag if self.dag else self.dag)
        leaves = [_leaves(_by_name(dag), "DAG: ") for dag in dags]
        old = {**self.values, **leaves[0]}
        new = {**other.values, **leaves[1]}
        changes = []
        for name in {**old, **new}:
            before = old.get(name)
            now = new.get(name)
            if _is_free_option(name) or before == now:
                continue
            if moved is not None and moved.is_same(before, now):
                continue
            if name.endswith(_LONGEST_ROW) and before is None:
                continue
            changes.append(f"{name}: {_shown(before)} -> {_shown(now)}")
        return changes

    def changes(self, config: Config, dag: DAG) -> list[str]:
        """Return the changes from this identity, of the run at ``run.url``, to that of a start.

        Places that are the same as seen from the run's folder, which was moved, are no change, and
        neither is a copy of its data. ConfigError for a damaged record.
        """
        url = config.run.url
        file = read_identity_file(url)
        if file is not None:
            config = with_recorded_data(config, self.values, file.data)
        return self.differences(RunIdentity.of(config, dag), relocation_of(url))


def read_identity(url: str) -> RunIdentity | None:
    """Return the identity of the run at ``url``; None if there is no run. ConfigError if it
    cannot be read.
    """
    try:
        fs, path = open_fs(url)
        if not fs.exists(f"{path}/{CONFIG_FILE}"):
            return None
        text = fs.cat_file(f"{path}/{CONFIG_FILE}")
        dag = _read_dag(fs, path)
    except StorageError as error:
        raise ConfigError(f"run.url={url!r}: {error}") from error
    return RunIdentity(_deciding(recorded_config(text, url)), redacted(_deciding_nodes(dag)))


def known_digests(config: Config, dag: DAG) -> list[str]:
    """Return the digests of the identity of the run at ``run.url``: the first as it starts now, the
    others as it started where it, or its data, was before, while nothing else has changed.

    ConfigError for a damaged record.
    """
    url = config.run.url
    identity = RunIdentity.of(config, dag)
    recorded = read_identity(url)
    file = read_identity_file(url)
    digests = [identity.digest()]
    if recorded is None or file is None:
        return digests
    if recorded.changes(config, dag):
        return digests
    digests.append(recorded.digest())
    return [*dict.fromkeys([*digests, *file.digests])]


def recorded_config(
    text: str | bytes,
    url: str,
    overrides: Sequence[str] = (),
    moved: Relocation | None = None,
) -> Config:
    """Return the configuration ``text`` that the run at ``url`` recorded, with overrides,
    ``key=value``. ``moved`` is how the run's folder was moved since.

    Interpolated for a text that is no record. ConfigError for unusable overrides, and, with what
    can still be read, when another version wrote the run.
    """
    file = join(url, CONFIG_FILE)
    change = (lambda values: values) if moved is None else moved.relocated
    try:
        recorded = load_recorded(text, file, change=change)
    except Interpolated:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Another version of siirl_dask wrote this run: its samples and metrics can "
            "be read, but to resume, evaluate or export it takes that version; a run of this "
            "version needs another run.name or run.url, or --fresh, which removes what is there"
        ) from error
    if overrides:
        return load_recorded(text, file, overrides, change)
    return recorded


def write_identity(
    config: Config,
    dag: DAG,
    *,
    replace: bool,
    data: Mapping[str, DataVersion] = MappingProxyType({}),
    tables: Mapping[str, DueTable] = MappingProxyType({}),
    models: Mapping[str, ModelVersion] = MappingProxyType({}),
) -> None:
    """Write ``config.yaml``, ``dag.json`` and ``identity.json``; with ``replace`` over existing
    ones.

    ``data`` is the state of the tables to train on, ``models`` that of the models to begin with, and
    ``tables`` those that the run saves from here on: what it saved before it has to have as well.
    ConfigError when another run has taken the folder in the meantime.
    """
    fs, path = open_fs(config.run.url)
    earlier = None
    digests = []
    if replace:
        earlier = read_identity_file(config.run.url)
        digests = known_digests(config, dag)[1:]
    if earlier is not None:
        kept = {name: one for name, one in earlier.tables.items() if name in tables}
        tables = {**tables, **kept}
        dataclasses.replace(earlier, files={}, digests=digests).write(config.run.url)
    # The token makes it differ from what another start of the same command writes: see
    # write_exclusive.
    text = f"# start {uuid4().hex}\n{dump(config, secrets=False)}".encode()
    try:
        (write_atomic if replace else write_exclusive)(fs, f"{path}/{CONFIG_FILE}", text)
    except Conflict as error:
        raise ConfigError(
            f"run.url={config.run.url!r} was taken by another run in the meantime"
        ) from error
    spec = (json.dumps(redacted(dag_to_spec(dag)), indent=2) + "\n").encode()
    write_atomic(fs, f"{path}/{DAG_FILE}", spec)
    files = {CONFIG_FILE: FileDigest.of(text), DAG_FILE: FileDigest.of(spec)}
    place = redacted(absolute(config.run.url))
    file = IdentityFile(
        files=files, data=data, tables=tables, url=place, models=models, digests=digests
    )
    file.write(config.run.url)


def check_writable(url: str, *, write: bool = True, option: str = "run.url") -> None:
    """Raise ConfigError, naming ``option``, unless files can be written below ``url``.

    Without ``write`` nothing is tried, so only a local folder can be judged.
    """
    try:
        fs, path = open_fs(url)
    except StorageError as error:
        raise ConfigError(f"{option}={url!r}: {error}") from error
    if isinstance(fs, LocalFileSystem):
        folder = Path(path)
        parent = next(
            place for place in (folder, *folder.parents) if place.exists() or place.is_symlink()
        )
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{option}={url!r}: {str(parent)!r} is no folder that this user can write to"
            )
    if write:
        with probe(url, option):
            pass


@contextmanager
def probe(url: str, option: str = "run.url") -> Iterator[str]:
    """Yield the name of a new file in the folder ``url``, and remove it again, with the folder if
    that is new.

    ConfigError, naming ``option``, if that fails.
    """
    name = f".writable-{uuid4().hex}"
    with _refused(f"{option}={url!r}"):
        fs, path = open_fs(url)
        existed = fs.exists(path)
        write_atomic(fs, f"{path}/{name}", b"")
    try:
        yield name
    finally:
        with _refused(f"{option}={url!r}"):
            remove_file(fs, f"{path}/{name}")
            if not existed and fs.exists(path):  # object stores have no folders
                # it is not empty: a worker that died, or another start, wrote there
                with suppress(OSError):
                    fs.rmdir(path)


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # each store has errors of its own: no bucket, no credentials, no connection
        raise ConfigError(
            f"{setting} cannot be written: {type(error).__name__}: {error}"
        ) from error


def remove_summary(url: str) -> None:
    """Delete ``summary.json``: it says how the run ended, and the run is resumed."""
    fs, path = open_fs(join(url, _SUMMARY))
    if fs.exists(path):
        fs.rm_file(path)


def remove_run(url: str, tables: Iterable[str]) -> None:
    """Delete everything that a run writes but the files of its attempts, and nothing else.

    Its checkpoints go first and its ``config.yaml`` last: until then the folder holds a run, which
    can be resumed or removed again.
    """
    fs, path = open_fs(url)
    checkpoints.remove_all(url)
    remove_steps(url, {*tables, *_saved_tables(fs, path), *_made_beside(fs, path)}, 0)
    remove_tree(fs, f"{path}/{STAGES}")
    events = [file for file in listed(fs, f"{path}/tensorboard") if "events.out.tfevents" in file]
    steps = listed(fs, f"{path}/profile")
    profiles = []
    for step in steps:
        for file in listed(fs, step):
            if _PROFILE.fullmatch(file[len(path) + 1 :]):
                profiles.append(file)
    for file in (*events, *profiles, *(f"{path}/{name}" for name in (*_FILES, CONFIG_FILE))):
        if fs.exists(file):
            fs.rm_file(file)


def _saved_tables(fs: AbstractFileSystem, path: str) -> set[str]:
    """Return the names of the tables that ``dag.json`` says the run saved."""
    try:
        names = {node.get("save_as") for node in _read_dag(fs, path).get("nodes", ())}
    except ConfigError:
        return set()  # a damaged file is removed like any other, and names no tables
    return {name for name in names if isinstance(name, str) and _TABLE.fullmatch(name)}


def _made_beside(fs: AbstractFileSystem, path: str) -> set[str]:
    """Return the names of the tables that replays of the run's rows have made, and of rows that
    were put aside.
    """
    names = {name.rpartition("/")[2] for name in listed(fs, path)}
    return {name for name in names if REPLAY.fullmatch(name) or name.startswith(NONFINITE)}


def _read_dag(fs: AbstractFileSystem, path: str) -> _Spec:
    """Return the DAG as plain data; options that it lacks get their defaults.

    It is empty where a start was killed before it wrote one.
    """
    if not fs.exists(f"{path}/{DAG_FILE}"):
        return {}
    try:
        spec: _Spec = json.loads(fs.cat_file(f"{path}/{DAG_FILE}"))
        roles = dict(spec["roles"])
        nodes = [dict(node) for node in spec["nodes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}/{DAG_FILE} is not a run's DAG: {type(error).__name__}: {error}"
        ) from error
    try:
        return dag_to_spec(dag_from_spec(roles, nodes))
    except PlanError:
        return spec  # it names functions that no longer exist: a difference like any other


def _deciding(config: Config) -> dict[str, Any]:
    """Return the configuration's values by key, without those that may change."""
    values = {}
    for key in config_keys():
        if not any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE):
            value: Any = config
            for name in key.split("."):
                value = getattr(value, name)
            values[key] = redacted({key: canonical(value)})[key]
    return values


def _is_free_option(name: str) -> bool:
    """Return whether ``name``, as ``DAG: roles.policy.with.trainer.lr``, is of an option that
    may change.
    """
    return any(f".with.{free}." in f"{name}." for free in _MAY_CHANGE)


def _deciding_nodes(dag: _Spec) -> _Spec:
    """Return a DAG as plain data, without the key ``stage`` of its nodes: results do not depend on
    which rows are stages.
    """
    if not dag:
        return dag
    nodes = []
    for node in dag.get("nodes", ()):
        nodes.append({key: value for key, value in node.items() if key != "stage"})
    return {**dag, "nodes": nodes}


def _by_name(dag: _Spec) -> dict[str, Any]:
    nodes = {node["name"]: node for node in dag.get("nodes", ())}
    return {"roles": dag.get("roles", {}), "nodes": nodes, "order": list(nodes)}


def _leaves(value: Any, before: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {before.rstrip("."): value}
    inner = (_leaves(item, f"{before}{key}.") for key, item in value.items())
    return {name: leaf for leaves in inner for name, leaf in leaves.items()}


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return json.dumps(value)
