"""Trains: turns a configuration and a DAG into files under ``run.url`` and a summary."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial

from distributed import Client
from siirl_storage import absolute, set_retry_seconds

from siirl_dask.config import Config, Engine
from siirl_dask.config.file import ConfigSource
from siirl_dask.driver.caller import RunCaller
from siirl_dask.driver.checks.number_type import OpenTypes, expected_dtype, is_open
from siirl_dask.driver.checks.preflight import Checked, check, check_observation
from siirl_dask.driver.checks.reachable import check_models_here
from siirl_dask.driver.collection import write_dataset
from siirl_dask.driver.failure_text import going_on_text
from siirl_dask.driver.launch import Job, plan_run, with_decided_type
from siirl_dask.driver.launch_loop import launch_until_done
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.models import fetch_here, find_models
from siirl_dask.driver.phases import (
    Phases,
    data_versions,
    model_versions,
    prepare,
    validation_of,
    worker_names,
)
from siirl_dask.driver.recovery.resume import (
    ResumePoint,
    check_same_data,
    find_resume_point,
    recorded_dtype,
)
from siirl_dask.driver.requested import DATA_URL, Recipe, RequestedRun, requested_run
from siirl_dask.driver.starts import Starts, find_starts
from siirl_dask.errors import ConfigError, Fenced, Interrupted, counted
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import Progress, Status, Summary
from siirl_dask.planner import DAG, Phase
from siirl_dask.rollout import engine_spec, servers_go_on
from siirl_dask.runs.attempt import Attempt, take
from siirl_dask.runs.folder import check_writable
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.driver")


def run(
    config: ConfigSource,
    dag: DAG | Recipe | None = None,
    validation: DAG | Recipe | None = None,
    *,
    client: Client | None = None,
    data: object = None,
    fresh: bool = False,
    force: bool = False,
    command: str | None = None,
) -> Summary:
    """Train ``dag`` as ``config`` says; ``validation`` runs over the validation data in between.

    ``config`` is anything that ``load`` takes: a ``Config``, a DictConfig as Hydra composes one, a
    dict, a dataclass, a path. ``dag`` may be a recipe, which makes it of the configuration; None
    takes the one that ``config`` spells. With ``validation.url`` and no ``validation``, the default
    validation of ``dag`` runs: see recipes/validation.py.

    ``client`` is a Dask client of the cluster to train on, in place of ``cluster.address``. ``data``
    is a Dask collection: a dask.dataframe, a bag of dicts, or a list of delayed values or futures
    of Arrow tables. Its workers write it as a table at ``data.url``, by default in the run's
    folder, and the run trains on that. A table of the same collection that is there is taken; one
    of other rows is a ConfigError unless ``fresh`` or ``force`` is set.

    A run that stopped is resumed from its newest checkpoint. ``fresh`` begins at step 1 and removes
    the run's files; ``force`` resumes although the configuration or the DAG has changed.
    ``command`` is the shell command that resumes the run, for the message about a failure.

    All files are under ``run.url`` when this returns, ``summary.json`` also when it raises.
    UserError before anything starts, RunInProgress if another process trains this run; RunError if
    the run failed, Fenced if another start has taken it over; Interrupted on Ctrl-C.
    """
    if client is not None and client.asynchronous:
        raise ConfigError(
            "client= is asynchronous, and run would block the event loop that it works in: use "
            "siirl_dask.submit, whose handle can be awaited"
        )
    requested = requested_run(config, dag, validation, data_url=None if data is None else DATA_URL)
    caller = RunCaller(client=client, data=data)
    return train(requested, caller, fresh=fresh, force=force, command=command)


def train(
    requested: RequestedRun,
    caller: RunCaller,
    *,
    fresh: bool = False,
    force: bool = False,
    command: str | None = None,
) -> Summary:
    """Train as ``run`` does, for any ``caller``."""
    hide()
    config = caller.on_its_cluster(requested.config)
    dag = requested.dag
    validation = requested.validation
    set_retry_seconds(config.storage.retry_seconds)
    progress = Progress(config.run.steps, enabled=config.observe.progress)
    validation = validation_of(config, dag, validation)
    starts = find_starts(config, (dag, validation), fresh=fresh)
    config, dag, validation = starts.with_folders(config, dag, validation)
    open_types = _open_types(config, dag, validation, fresh=fresh)
    if open_types is not None:
        config, dag, validation = with_decided_type(open_types, open_types.expected.dtype)
    resume = find_resume_point(config, dag, fresh=fresh, force=force)
    with ExitStack() as taken:
        attempt = None
        if caller.data is not None:
            # first: the dataset of another start that goes on may not be replaced
            check_writable(config.run.url)
            attempt = taken.enter_context(_taken(config, progress))
            write_dataset(caller, config, resume, force=force, note=progress.note)
        planned, checked = _planned(config, dag, validation, starts, resume)
        data = data_versions(planned)
        check_same_data(config.run.url, resume, data, model_versions(config), force=force)
        check_writable(config.run.url)
        if prepare(config):
            checked = check(config, planned)  # again: now the dataset and the model exist
        if attempt is None:
            attempt = taken.enter_context(_taken(config, progress))
        if not starts.are_written:
            for note in starts.notes:
                progress.note(note)
            starts.write(config.run.url, fresh=fresh)
            checked = check(config, planned)
        check_models_here(config.cluster, checked.reads)
        job = Job(
            config=config,
            dag=dag,
            validation=validation,
            checked=checked,
            models=find_models(checked.reads),
            fresh=fresh,
            force=force,
            caller=caller,
            open_types=open_types,
        )
        log = RunLog(config, attempt, progress, resume, command, on_record=caller.on_record)
        return _run(job, log)


def _planned(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    starts: Starts,
    resume: ResumePoint,
) -> tuple[Phases, Checked]:
    """Return the plans of a run, and what its checks found.

    Where the run starts from folders that are not written yet, the checks look at the folders that
    these will be made of.
    """
    plan = partial(
        plan_run,
        workers=worker_names(config),
        resume=resume,
        assume_columns=config.data.prepare is not None,
    )
    planned = plan(config, dag, validation)
    check_observation(config, planned[Phase.TRAIN][0])
    if starts.are_written:
        return planned, check(config, planned)
    base_config, base_dag, base_validation = starts.with_bases(config, dag, validation)
    return planned, check(base_config, plan(base_config, base_dag, base_validation))


def _taken(config: Config, progress: Progress) -> Attempt:
    """Take the run's folder. Interrupted for Ctrl-C while an earlier start is waited for."""
    try:
        # workers run in other folders
        return take(absolute(config.run.url), config.run.lease, progress.note)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped by the user, while it waited for a sign of life of an earlier start"
        ) from None


def _open_types(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    *,
    fresh: bool,
) -> OpenTypes | None:
    """Return the run with what ``model.dtype=auto`` is expected to stand for; None where no
    model has that type.
    """
    dags = (dag,) if validation is None else (dag, validation)
    if not is_open(config, dags):
        return None
    recorded = None
    if not fresh:
        recorded = recorded_dtype(config.run.url)
    return OpenTypes(config, dags, expected_dtype(config.cluster, recorded))


def _run(job: Job, log: RunLog) -> Summary:
    """Run as ``run`` does, once this start has the folder."""
    try:
        for warning in job.checked.warnings:
            log.progress.warn(warning)
        fetch_here(job.models, job.config.cluster, log.progress)
        _note_start(log)
        with servers_go_on(job.config, log.progress.note):
            launch_until_done(job, log)
        log.attempt.check()
    except KeyboardInterrupt as stop:
        message = (
            f"stopped by the user after {log.steps} of {counted(job.config.run.steps, 'step')}; what was "
            "written is whole"
        )
        log.end(Status.INTERRUPTED, message + str(stop))
        interrupted = Interrupted(message + str(stop))
        if log.begun:
            interrupted.report = "\n".join(going_on_text(job.config, log.steps, log.command))
        raise interrupted from None
    except BaseException as error:
        fenced = None
        if not isinstance(error, Fenced):
            fenced = _fenced(log)
        if fenced is not None:
            log.fail(fenced)
            raise fenced from error  # a file that could not be written is what follows from that
        log.fail(error)
        raise
    return log.end(Status.COMPLETE, None)


def _fenced(log: RunLog) -> Fenced | None:
    """Return why the run's folder is not this start's any more; None where it is, or where
    nobody can look.
    """
    try:
        log.attempt.check()
    except Fenced as fenced:
        return fenced
    except Exception as error:
        # each store has errors of its own, and it may be what the run failed of
        text = redacted(f"{log.attempt.url} cannot be looked at: {type(error).__name__}: {error}")
        logger.warning("%s", text)
    return None


def _note_start(log: RunLog) -> None:
    cluster = log.config.cluster
    how = ""
    if cluster.spec:
        how = f" as {cluster.spec} says"
    log.progress.note(f"starting {counted(cluster.workers, 'worker')}{how}")
    if log.config.rollout.engine == Engine.auto:
        log.progress.note(f"rollout.engine=auto takes {engine_spec(Engine.auto).name}")
