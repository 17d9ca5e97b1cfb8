"""Reads a run from its folder, without torch or Dask: configuration, DAG, metrics, summary and
samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from siirl_storage import StorageError, join, open_fs

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError, PlanError, SiirlError, clause
from siirl_dask.observe import EVAL_FILE as RESULT_FILE
from siirl_dask.observe import Record, Summary, read_metrics, read_summary
from siirl_dask.planner import bind, contract_of, options_of, provides_of, resolve
from siirl_dask.runs.absent import hint_if_absent
from siirl_dask.runs.checkpoints import committed
from siirl_dask.runs.folder import CONFIG_FILE, DAG_FILE, recorded_config
from siirl_dask.runs.identity_file import Relocation, relocation_of
from siirl_dask.runs.samples.rollouts import query
from siirl_dask.runs.samples.token_texts import decoder, tokenizer_file
from siirl_dask.runs.samples.utterances import Decode
from siirl_dask.schema import REWARD


@dataclass(frozen=True, slots=True)
class RunReward:
    """The reward function of a run, and its columns."""

    reward: Callable[..., Any]
    """The reward function, its options bound."""
    columns: tuple[str, ...] = ()
    """Columns that the function is given besides prompt, response and answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """Gives access to a run's folder. Each property reads its file anew, so a run that is under
    way can be watched.
    """

    url: str

    @property
    def config(self) -> Config:
        """The configuration that the run was started with; of a run that was moved since, with
        places as they are now. ConfigError if another version wrote it.
        """
        return self.config_with()

    def config_with(self, overrides: Sequence[str] = ()) -> Config:
        """Return the run's configuration with overrides, ``key=value``. ConfigError for unusable
        ones.
        """
        text = _read(self.url, CONFIG_FILE)
        if text is None:
            raise ConfigError(f"{self.url!r} holds no run: expected a folder with a {CONFIG_FILE}")
        return recorded_config(text, self.url, overrides, self._moved())

    @property
    def dag(self) -> Mapping[str, Any]:
        """The DAG that was trained, as plain data: ``roles`` by name and ``nodes`` in order,
        functions by name.

        ``siirl_dask.planner.dag_from_spec(**run.dag)`` makes the DAG from it and imports its
        functions. ConfigError if the file is damaged.
        """
        text = _read(self.url, DAG_FILE)
        if text is None:
            return {"roles": {}, "nodes": []}  # the start of the run was killed before it wrote one
        try:
            spec = json.loads(text)
            dag = {"roles": dict(spec["roles"]), "nodes": list(spec["nodes"])}
        except (KeyError, TypeError, ValueError) as error:
            where = join(self.url, DAG_FILE)
            raise ConfigError(
                f"{where} is not a run's DAG: {type(error).__name__}: {error}"
            ) from error
        moved = self._moved()
        return dag if moved is None else moved.relocated(dag)

    @property
    def steps(self) -> list[int]:
        """Steps that were trained and logged, ascending."""
        return sorted({record["step"] for record in self._records() if record["phase"] == "train"})

    @property
    def checkpoints(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending."""
        return committed(self.url)

    @property
    def metrics(self) -> pa.Table:
        """Metrics as a table, one row per step, validation and test: ``step``, ``phase``,
        ``seconds``, each metric.
        """
        records = list(self._records())
        names = dict.fromkeys(name for record in records for name in record["metrics"])
        columns: dict[str, pa.Array] = {
            "step": pa.array([record["step"] for record in records], pa.int64()),
            "phase": pa.array([record["phase"] for record in records], pa.string()),
            "seconds": pa.array([record["seconds"] for record in records], pa.float64()),
        }
        for name in names:
            columns[name] = pa.array(
                [record["metrics"].get(name) for record in records], pa.float64()
            )
        return pa.table(columns)

    @property
    def summary(self) -> Summary:
        """The summary that the run wrote when it ended. DataError while it is under way, or
        after it was killed.
        """
        return read_summary(self.url)

    def rollouts(
        self, sql: str = "SELECT * FROM rollouts", *, incomplete: bool = False
    ) -> pa.Table:
        """Return the answer to ``sql`` over the samples of every whole step; with ``incomplete``
        also of the others.

        DataError without samples or for wrong SQL.
        """
        return query(self.url, sql, incomplete=incomplete)

    def checkpoint_step(self, step: int | None = None) -> int:
        """Return ``step``, or the newest checkpoint's for None. ConfigError when there is no
        such checkpoint.
        """
        steps = self.checkpoints
        if not steps:
            raise ConfigError(
                f"run {self.url!r} has no checkpoint: none was complete when it ended "
                "(checkpoint.every)"
            )
        if step is not None and step not in steps:
            raise ConfigError(
                f"run {self.url!r} has no checkpoint of step {step} (there are: {steps})"
            )
        if step is None:
            return steps[-1]
        return step

    def scoring(self) -> RunReward:
        """Return how the run's DAG scores responses. ConfigError when its reward function cannot
        be imported.
        """
        spec = self.dag
        name = next(
            (name for name, role in spec["roles"].items() if "scorer" in _provided(role["build"])),
            None,
        )
        if name is None:
            raise ConfigError(
                f"the DAG of run {self.url!r} has no reward function: name one with --reward "
                "module:function"
            )
        role = spec["roles"][name]
        try:
            scorer = bind(resolve(role["build"]), role["with"], "the run's reward")
        except PlanError as error:
            raise ConfigError(
                f"the reward function of run {self.url!r} cannot be imported: {clause(error)}; name one "
                "with --reward"
            ) from error
        return RunReward(options_of(scorer)["reward"], next(_scored_columns(spec, name), ()))

    def _moved(self) -> Relocation | None:
        try:
            return relocation_of(self.url)
        except ConfigError:
            return None  # a damaged record: `check` names it, and all else of the run can be read

    def _records(self) -> Iterator[Record]:
        yield from read_metrics(self.url)


def open_run(url: str) -> Run:
    """Return the run at ``url``, a folder or any fsspec URL. ConfigError when there is none."""
    if not is_run(url):
        raise ConfigError(
            f"{url!r} holds no run: expected a folder with a {CONFIG_FILE}{hint_if_absent(url)}"
        )
    return Run(url)


def decoder_of_run(url: str) -> Decode | None:
    """Return what turns the tokens of a run's, or an evaluation's, samples into text; None where
    that is not here.
    """
    try:
        return decoder(tokenizer_file(_model_of(url)))
    except SiirlError:
        return None


def _model_of(url: str) -> str | None:
    """Return the model of a run, or the one that an evaluation has sampled from; None where
    neither is at ``url``.
    """
    if is_run(url):
        return Run(url).config.model.path
    try:
        evaluated = json.loads(_read(url, RESULT_FILE) or b"{}").get("model")
    except (ValueError, AttributeError):
        return None
    if not isinstance(evaluated, str):
        return None
    if is_run(evaluated):
        return Run(evaluated).config.model.path
    return evaluated


def is_run(url: str) -> bool:
    """Return whether there is a run at ``url``. ConfigError for a URL that cannot be opened."""
    return _read(url, CONFIG_FILE) is not None


def _provided(build: str) -> frozenset[str]:
    """Return what a builder declares to provide; nothing if it cannot be imported."""
    try:
        return provides_of(resolve(build))
    except PlanError:
        return frozenset()


def _scored_columns(spec: Mapping[str, Any], role: str) -> Iterator[tuple[str, ...]]:
    """Yield the further columns of each node that scores with ``role``."""
    for node in spec["nodes"]:
        try:
            fn = bind(resolve(node["run"]), node["with"], f"node {node['name']!r}")
        except PlanError:
            continue  # a function of the user's that cannot be imported
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
