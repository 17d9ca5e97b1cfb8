"""Reads a run where it lies, without torch and without Dask: its configuration, DAG, numbers and samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from siirl_storage import StorageError, join, open_fs

from siirl_dask.config import Config
from siirl_dask.config.file import load_text
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.observe.metrics import Record, read_metrics
from siirl_dask.observe.summary import Summary, read_summary
from siirl_dask.planner import resolve
from siirl_dask.planner.contract import contract_of, options_of, provides_of
from siirl_dask.planner.spec import bind
from siirl_dask.runs.checkpoints import committed
from siirl_dask.runs.folder import CONFIG_FILE, DAG_FILE
from siirl_dask.runs.rollouts import query
from siirl_dask.schema import REWARD


@dataclass(frozen=True, slots=True)
class Scoring:
    """The reward function of a run, its options bound, and the further columns that it is given."""

    reward: Callable[..., Any]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder. Each property reads its file anew, so a run that is under way can be watched."""

    url: str

    @property
    def config(self) -> Config:
        """The configuration that the run was started with. ConfigError if another version wrote it."""
        return self.config_with()

    def config_with(self, overrides: Sequence[str] = ()) -> Config:
        """The run's configuration with overrides, ``key=value``. ConfigError for those that cannot be used."""
        text = _read(self.url, CONFIG_FILE)
        if text is None:
            raise ConfigError(f"{self.url!r} holds no run: expected a folder with a {CONFIG_FILE}")
        return load_text(text, join(self.url, CONFIG_FILE), overrides)

    @property
    def dag(self) -> Mapping[str, Any]:
        """The DAG that was trained, as plain data: ``roles`` by name and ``nodes`` in order, functions by name.

        ``siirl_dask.planner.dag_from_spec(**run.dag)`` makes the DAG of it, which imports its functions.
        """
        text = _read(self.url, DAG_FILE)
        if text is None:
            return {"roles": {}, "nodes": []}  # the start of the run was killed before it wrote one
        try:
            spec = json.loads(text)
            return {"roles": dict(spec["roles"]), "nodes": list(spec["nodes"])}
        except (KeyError, TypeError, ValueError) as error:
            where = join(self.url, DAG_FILE)
            raise ConfigError(f"{where} is not a run's DAG: {type(error).__name__}: {error}") from error

    @property
    def steps(self) -> list[int]:
        """Steps that were trained and logged, ascending."""
        return sorted({record["step"] for record in self._records() if record["phase"] == "train"})

    @property
    def checkpoints(self) -> list[int]:
        """Steps of which there is a whole checkpoint, ascending."""
        return committed(self.url)

    @property
    def metrics(self) -> pa.Table:
        """One row a step or a pass over validation or test data: ``step``, ``phase``, ``seconds``, and each metric."""
        records = list(self._records())
        names = dict.fromkeys(name for record in records for name in record["metrics"])
        columns: dict[str, pa.Array] = {
            "step": pa.array([record["step"] for record in records], pa.int64()),
            "phase": pa.array([record["phase"] for record in records], pa.string()),
            "seconds": pa.array([record["seconds"] for record in records], pa.float64()),
        }
        for name in names:
            columns[name] = pa.array([record["metrics"].get(name) for record in records], pa.float64())
        return pa.table(columns)

    @property
    def summary(self) -> Summary:
        """How the run ended. DataError while it is under way, or after it was killed."""
        return read_summary(self.url)

    def rollouts(self, sql: str = "SELECT * FROM rollouts") -> pa.Table:
        """The answer to ``sql`` over every sample of the run. DataError if there is none or the SQL is wrong."""
        return query(self.url, sql)

    def checkpoint_step(self, step: int | None = None) -> int:
        """``step``, or that of the newest checkpoint. ConfigError when the run has no such checkpoint."""
        steps = self.checkpoints
        if not steps:
            raise ConfigError(f"run {self.url!r} has no checkpoint: none was whole when it ended (checkpoint.every)")
        if step is not None and step not in steps:
            raise ConfigError(f"run {self.url!r} has no checkpoint of step {step} (there are: {steps})")
        return steps[-1] if step is None else step

    def scoring(self) -> Scoring:
        """How the run's DAG scores responses. ConfigError when its reward function cannot be found here."""
        spec = self.dag
        name = next((name for name, role in spec["roles"].items() if "scorer" in _provided(role["build"])), None)
        if name is None:
            raise ConfigError(
                f"the DAG of run {self.url!r} has no reward function: name one with --reward module:function"
            )
        role = spec["roles"][name]
        try:
            scorer = bind(resolve(role["build"]), role["with"], "the run's reward")
        except PlanError as error:
            raise ConfigError(
                f"the reward function of run {self.url!r} is not here: {error}; name one with --reward"
            ) from error
        return Scoring(options_of(scorer)["reward"], next(_scored_columns(spec, name), ()))

    def _records(self) -> Iterator[Record]:
        yield from read_metrics(self.url)


def open_run(url: str) -> Run:
    """The run at ``url``, a folder or any fsspec URL. ConfigError when there is none."""
    if not is_run(url):
        raise ConfigError(f"{url!r} holds no run: expected a folder with a {CONFIG_FILE}")
    return Run(url)


def is_run(url: str) -> bool:
    """Whether there is a run at ``url``. ConfigError for a URL that cannot be opened."""
    return _read(url, CONFIG_FILE) is not None


def _provided(build: str) -> frozenset[str]:
    """What a builder declares to provide; nothing where it is not found here."""
    try:
        return provides_of(resolve(build))
    except PlanError:
        return frozenset()


def _scored_columns(spec: Mapping[str, Any], role: str) -> Iterator[tuple[str, ...]]:
    """The further columns of each node that scores by ``role``."""
    for node in spec["nodes"]:
        try:
            fn = bind(resolve(node["run"]), node["with"], f"node {node['name']!r}")
        except PlanError:
            continue  # a function of the user's that is not here
        contract = contract_of(fn)
        if REWARD in contract.writes.names and role in (node["role"], contract.neighbour):
            yield tuple(options_of(fn).get("columns", ()))


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
