"""One run, from a configuration and a DAG to files under ``run.url`` and a summary."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from siirl_storage import Conflict, StorageError, join, open_fs, write_atomic, write_exclusive
from siirl_storage.files import absolute

from siirl_dask.cluster import connect, members
from siirl_dask.config import Config, Engine
from siirl_dask.configfile import dump
from siirl_dask.coordinator.messages import Turn
from siirl_dask.driver import Driver
from siirl_dask.errors import ConfigError, Interrupted
from siirl_dask.memory import refuse_what_cannot_fit
from siirl_dask.observe import Status, Summary
from siirl_dask.phases import PREPARED, plan_phases, prepare, worker_names
from siirl_dask.planner import DAG, dag_to_spec
from siirl_dask.rollout import choose_engine
from siirl_dask.runlog import RunLog
from siirl_dask.worker.dag_worker import RunSpec
from siirl_dask.worker.dataplane import DataSettings
from siirl_dask.worker.parcel import pack

CONFIG_FILE = "config.yaml"
_CLOSE_TIMEOUT = 30.0  # seconds for every worker to let go of its model after the last step


def run(config: Config, dag: DAG, validation: DAG | None = None) -> Summary:
    """Train ``dag`` as ``config`` says; ``validation`` runs over the validation data in between.

    Everything is under ``run.url`` when this returns, ``summary.json`` also when it raises. UserError before anything
    starts; RunError when the run could not go on; Interrupted on Ctrl-C.
    """
    _refuse_second_run(config.run.url)
    assumed = PREPARED if config.data.prepare else None
    planned = plan_phases(config, dag, validation, worker_names(config), assumed)
    pack(planned)
    prepare(config)
    refuse_what_cannot_fit(config, planned)  # of a model that is there by now
    log = RunLog(config)
    try:
        log.progress.note(f"starting {config.cluster.workers} workers")
        if config.rollout.engine is Engine.auto:
            log.progress.note(f"rollout.engine=auto takes {choose_engine(Engine.auto)}")
        with connect(config) as client:
            found = members(client, config.cluster.workers)
            phases = plan_phases(config, dag, validation, list(found))
            spec = RunSpec(
                run=uuid.uuid4().hex[:12],
                url=absolute(config.run.url),  # a worker of an existing cluster may run in another folder
                seed=config.run.seed,
                members=found,
                parcel=pack(phases),
                threads=config.cluster.threads,
                data=DataSettings.of(config),
            )
            lookahead = config.run.lookahead + (config.rollout.ahead or 0)
            driver = Driver(client, spec, lookahead, config.cluster.stall_timeout)
            _drive(driver, config, dag, log, client.dashboard_link, list(phases))
    except KeyboardInterrupt:
        message = f"stopped by the user after {log.steps} of {config.run.steps} steps; what was written is whole"
        log.end(Status.INTERRUPTED, message)
        raise Interrupted(message) from None
    except BaseException as error:
        log.end(Status.FAILED, f"{type(error).__name__}: {error}")
        raise
    return log.end(Status.COMPLETE, None)


def _drive(driver: Driver, config: Config, dag: DAG, log: RunLog, dashboard: str, phases: Sequence[str]) -> None:
    try:
        driver.start(config.cluster.start_timeout)
        _write_description(config, dag)
        log.begin(dashboard)
        before = driver.traffic()
        for done in driver.run(settling(turns(config, phases))):
            log.record(done)
        after = driver.traffic()
        log.scheduler_bytes = None if before is None or after is None else after - before
        driver.finish(_CLOSE_TIMEOUT)
    except BaseException as error:
        driver.abort(f"the run was stopped: {type(error).__name__}")
        raise
    finally:
        if config.cluster.address or config.cluster.scheduler_file:
            driver.close()  # a cluster that was started for this run ends with it


def turns(config: Config, phases: Sequence[str]) -> Iterator[Turn]:
    """Every turn of a run in order: validation before the first step, every so often, and last; the test at the end."""
    sequence = iter(range(2**62))
    if "validation" in phases:
        yield Turn("validation", 0, next(sequence))
    for step in range(1, config.run.steps + 1):
        yield Turn("train", step, next(sequence))
        if "validation" in phases and (step % config.validation.every == 0 or step == config.run.steps):
            yield Turn("validation", step, next(sequence))
    if "test" in phases:
        yield Turn("test", config.run.steps, next(sequence))


def settling(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Nodes that are behind catch up before anything but training comes, so that all of it is of its step."""
    for turn, following in pairwise(chain(turns, [None])):
        assert turn is not None
        settles = turn.phase == "train" and (following is None or following.phase != "train")
        yield replace(turn, settles=settles)


def _refuse_second_run(url: str) -> None:
    try:
        fs, path = open_fs(join(url, CONFIG_FILE))
        taken = fs.exists(path)
    except StorageError as error:
        raise ConfigError(f"run.url={url!r}: {error}") from error
    if taken:
        raise ConfigError(f"run.url={url!r} holds a run already: choose another run.name or run.url, or remove it")


def _write_description(config: Config, dag: DAG) -> None:
    fs, path = open_fs(join(config.run.url, CONFIG_FILE))
    try:
        write_exclusive(fs, path, dump(config).encode())
    except Conflict as error:
        raise ConfigError(f"run.url={config.run.url!r} was taken by another run in the meantime") from error
    fs, path = open_fs(join(config.run.url, "dag.json"))
    write_atomic(fs, path, (json.dumps(dag_to_spec(dag), indent=2) + "\n").encode())
