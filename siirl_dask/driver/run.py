"""Trains: turns a configuration and a DAG into files under ``run.url`` and a summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from distributed import Client
from siirl_storage import set_retry_seconds
from siirl_storage.files import absolute

from siirl_dask.config import Config, Engine
from siirl_dask.driver.cluster import connect
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.iterations import iterations
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.models import Models, fetch_here, fetch_on_workers, find_models
from siirl_dask.driver.phases import Phases, plan_phases, prepare, validation_of, worker_names
from siirl_dask.driver.preemption import Preempted, Preemption
from siirl_dask.driver.preflight import Checked, check
from siirl_dask.driver.processes import hosts_of, members
from siirl_dask.driver.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.reachable import check_reachable
from siirl_dask.driver.replacement import find_workers
from siirl_dask.driver.restarts import Restarts
from siirl_dask.driver.resume import ResumePoint, find_resume_point, weights_dag
from siirl_dask.driver.stages import with_stages
from siirl_dask.driver.under_way import Done, Staged, Written
from siirl_dask.driver.verification import verified_resume_point
from siirl_dask.errors import ConfigError, Interrupted, SiirlError
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import Progress, Status, Summary
from siirl_dask.planner import DAG, NO_DATA, Hosts, Phase, compile_chains
from siirl_dask.planner.placement import host_notes
from siirl_dask.rollout import choose_engine
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import State
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.folder import (
    RunIdentity,
    check_writable,
    remove_run,
    remove_summary,
    write_identity,
)
from siirl_dask.runs.retention import remove_old_stages
from siirl_dask.runs.stages import describe_stage
from siirl_dask.runs.tables import commit_table, remove_steps, tables_of
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.worker.run_spec import RunSpec


def run(
    config: Config, dag: DAG, validation: DAG | None = None, *, fresh: bool = False, force: bool = False
) -> Summary:
    """Train ``dag`` as ``config`` says; ``validation`` runs over the validation data in between.

    With ``validation.url`` and no ``validation``, the default validation of ``dag`` runs: see recipes/common.py.

    A run that stopped is resumed from its newest checkpoint. ``fresh`` begins anew and removes what the run left;
    ``force`` resumes although the configuration or the DAG has changed.

    All files are under ``run.url`` when this returns, ``summary.json`` also when it raises. UserError before anything
    starts, RunInProgress if another process trains this run; RunError if the run failed, Fenced if another start has
    taken it over; Interrupted on Ctrl-C.
    """
    hide()
    set_retry_seconds(config.storage.retry_seconds)
    validation = validation_of(config, dag, validation)
    resume = find_resume_point(config, dag, fresh=fresh, force=force)
    planned = _plan(config, dag, validation, worker_names(config), resume, assume=config.data.prepare is not None)
    checked = check(config, planned)
    check_writable(config.run.url)
    if prepare(config):
        checked = check(config, planned)  # again: now the dataset and the model exist
    progress = Progress(config.run.steps, enabled=config.observe.progress)
    try:
        attempt = take(absolute(config.run.url), config.run.lease, progress.note)  # workers run in other folders
    except KeyboardInterrupt:
        raise Interrupted("stopped by the user, while it waited for a sign of life of an earlier start") from None
    with attempt:
        job = _Job(config, dag, validation, checked, find_models(checked.reads), fresh, force)
        return _run(job, RunLog(config, attempt, progress, resume))


@dataclass(frozen=True, slots=True)
class _Job:
    """A run as the user wants it, which has been checked."""

    config: Config
    dag: DAG
    validation: DAG | None
    checked: Checked
    models: Models
    fresh: bool
    force: bool


def _run(job: _Job, log: RunLog) -> Summary:
    """Run as ``run`` does, once this start has the folder."""
    try:
        fetch_here(job.models, job.config.cluster, log.progress)
        _note_start(log)
        with connect(job.config, log.progress) as client:
            _try_until_done(job, log, client)
    except KeyboardInterrupt as stop:
        message = f"stopped by the user after {log.steps} of {job.config.run.steps} steps; what was written is whole"
        log.end(Status.INTERRUPTED, message + str(stop))
        raise Interrupted(message + str(stop)) from None
    except BaseException as error:
        log.end(Status.FAILED, f"{type(error).__name__}: {error}")
        raise
    return log.end(Status.COMPLETE, None)


def _try_until_done(job: _Job, log: RunLog, client: Client) -> None:
    """Try the run until it is complete, or until a failure ends it: see ``Restarts``."""
    restarts = Restarts(job.config.run.max_restarts, log.progress.note, log.announce)
    log.restarts = restarts.done
    named = members(client, job.config.cluster.workers)
    last: Driver | None = None
    try:
        while True:
            try:
                tried = _prepare(job, log, client, named, last)
                earlier, last = last, tried.driver
                _drive(tried, log, client.dashboard_link, restarts, earlier)
                return
            except SiirlError as error:
                if not restarts.after(error, log.steps):
                    if (cause := restarts.cause(error)) is error:
                        raise
                    raise cause from error
            log.progress.close()
            restarts.pause()
            log.attempt.begin_again()
            named = find_workers(client, job.config, named, log.progress)
    finally:
        if last is not None and job.config.cluster.exists:
            last.close()


@dataclass(frozen=True, slots=True)
class _Try:
    """A try of the run that is planned, and has not begun."""

    driver: Driver
    phases: Phases
    prepare_folder: Callable[[], None]
    commit: Callable[[Staged | Written], None]
    """Commits a table or a checkpoint."""
    notes: Sequence[str]
    """Sentences for the user."""


def _prepare(job: _Job, log: RunLog, client: Client, named: Mapping[str, str], last: Driver | None) -> _Try:
    """Find where the run goes on, and plan it for the workers ``named``; ``last`` had what they have built."""
    config, dag, fresh = job.config, job.dag, job.fresh and not log.begun
    resume = verified_resume_point(config, dag, client, named, fresh=fresh, force=job.force)
    log.resume_at(with_stages(config, dag, resume, client, named))
    again = last is not None
    phases = _plan(config, dag, job.validation, list(named), log.resume, hosts_of(named), again=again)
    check_reachable(client, named, phases, job.checked.reads, config.run.url)
    fetch_on_workers(client, config.cluster, named, phases[Phase.TRAIN][0], job.checked.reads, job.models, log.progress)
    store = DistributedCheckpoint(config.checkpoint.asynchronous)
    follows = None if last is None else last.plugin
    spec = RunSpec.of(config, named, phases, log.attempt.number, store, log.resume.checkpoint, follows, job.models)
    keep, best = config.checkpoint.keep, config.checkpoint.keep_best
    checkpoints = Checkpoints(attempt=log.attempt, keep=keep, keep_best=best, done=log.resume.done)
    lookahead = config.run.lookahead + (config.rollout.steps_ahead or 0)
    driver = Driver(client, spec, lookahead, config.cluster.stall_timeout, checkpoints.folder)
    prepare_folder = partial(_prepare_folder, config, dag, job.validation, log)
    commit = partial(_commit, checkpoints, log, RunIdentity.of(config, dag).digest())
    train = phases[Phase.TRAIN]
    shown = config.observe.progress and not again
    notes = [*host_notes(train[0]), *notes_on_long_prompts(config, *train)] if shown else []
    return _Try(driver, phases, prepare_folder, commit, notes)


def _note_start(log: RunLog) -> None:
    cluster = log.config.cluster
    log.progress.note(f"starting {cluster.workers} workers{f' as {cluster.spec} says' if cluster.spec else ''}")
    if log.config.rollout.engine is Engine.auto:
        log.progress.note(f"rollout.engine=auto takes {choose_engine(Engine.auto)}")


def _drive(tried: _Try, log: RunLog, dashboard: str, restarts: Restarts, earlier: Driver | None) -> None:
    """Have the driver run every iteration, and log or commit each as it is done."""
    config, resume, driver, phases = log.config, log.resume, tried.driver, tried.phases
    with driver.at_work(config.cluster, lambda error: restarts.after(error, log.steps), earlier):
        tried.prepare_folder()
        log.begin(dashboard)
        for note in tried.notes:
            log.progress.note(note)
        restarts.at_work(log.resume.done, config.cluster.workers, sum(map(bool, driver.kept.values())))
        before = driver.traffic()
        with Preemption(config.run.grace if config.checkpoint.every else 0.0, log.progress.note) as preemption:
            planned = iterations(config, list(phases), resume.done, resume.stages, resume.measured)
            for event in driver.run(preemption.cut(planned)):
                if isinstance(event, Done):
                    log.record(event)
                else:
                    tried.commit(event)
        after = driver.traffic()
        log.scheduler_bytes = None if before is None or after is None else after - before
    if preemption.asked and log.steps < config.run.steps:
        raise Preempted(f", the checkpoint of step {log.steps} as well" if log.steps else "")


def _plan(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    workers: Sequence[str],
    resume: ResumePoint,
    hosts: Hosts | None = None,
    *,
    assume: bool = False,
    again: bool = False,
) -> Phases:
    """Plan the phases of the run; a resumed run gets one more, which loads the weights into the engines.

    So does one that is tried ``again`` from the beginning: engines that were kept have newer weights.
    """
    phases = plan_phases(config, dag, validation, workers, hosts, assume_columns=assume)
    if (best := config.checkpoint.keep_best) and best.partition("/")[0] not in phases:
        raise ConfigError(f"checkpoint.keep_best={best!r}: there is no validation; give validation.url")
    if (resume.done or again) and (loading := weights_dag(dag)) is not None:
        plan = compile_chains(loading, workers, NO_DATA, config.cluster.placement, hosts)
        phases[Phase.WEIGHTS] = (plan, phases[Phase.TRAIN][1])
    if resume.cut is not None:
        plan = compile_chains(resume.cut.dag, workers, NO_DATA, config.cluster.placement, hosts)
        phases[Phase.REPLAY] = (plan, phases[Phase.TRAIN][1])
    return phases


def _prepare_folder(config: Config, dag: DAG, validation: DAG | None, log: RunLog) -> None:
    """Remove files of an earlier start that no longer count, and write the run's identity. Fenced if it is too late."""
    url, tables, resume = config.run.url, tables_of([dag, validation]), log.resume
    log.attempt.check()
    if resume.fresh:
        remove_run(url, tables)
    elif resume.exists:
        remove_steps(url, tables, resume.last)
        remove_summary(url)
    write_identity(config, dag, replace=resume.exists)


def _commit(checkpoints: Checkpoints, log: RunLog, digest: str, written: Staged | Written) -> None:
    """Commit a table of a step, or a checkpoint, that every worker has written. ``digest`` is that of the identity."""
    step = written.iteration.step
    if isinstance(written, Staged):
        about = describe_stage(
            digest=digest, attempt=log.attempt.number, metrics=written.metrics, position=written.position
        )
        commit_table(log.attempt, written.table, step, written.parts, about)
        return
    state = State.of(step, written.saved, metrics=log.metrics_of(step), digest=digest)
    checkpoints.commit(written.url, state, written.files)
    if (keep := log.config.run.keep_stages) is not None:
        remove_old_stages(log.attempt.url, keep)
