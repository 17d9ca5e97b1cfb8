"""Trains: turns a configuration and a DAG into files under ``run.url`` and a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from distributed import Client
from siirl_storage import set_retry_seconds
from siirl_storage.files import absolute

from siirl_dask.config import Config, Engine
from siirl_dask.driver.cluster import connect, reconnect
from siirl_dask.driver.commits import Commits
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.elastic import Elastic
from siirl_dask.driver.iterations import iterations
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.models import Models, fetch_here, fetch_on_workers, find_models
from siirl_dask.driver.phases import Phases, plan_phases, prepare, validation_of, worker_names
from siirl_dask.driver.preemption import Preempted, Preemption
from siirl_dask.driver.preflight import Checked, check
from siirl_dask.driver.processes import hosts_of
from siirl_dask.driver.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.reachable import check_reachable
from siirl_dask.driver.replacement import Fixed
from siirl_dask.driver.restarts import Restarts
from siirl_dask.driver.resume import ResumePoint, find_resume_point, weights_dag
from siirl_dask.driver.stages import with_stages
from siirl_dask.driver.under_way import Done
from siirl_dask.driver.verification import verified_resume_point
from siirl_dask.driver.worker_group import WorkerGroup, WorkerGroups
from siirl_dask.errors import ConfigError, Interrupted, SchedulerLost, SiirlError
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import Progress, Status, Summary
from siirl_dask.planner import DAG, NO_DATA, Hosts, Phase, compile_chains, frontiers, replay_plan
from siirl_dask.planner.inputs import alike
from siirl_dask.planner.placement import host_notes
from siirl_dask.rollout import choose_engine
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.folder import (
    RunIdentity,
    check_writable,
    remove_run,
    remove_summary,
    write_identity,
)
from siirl_dask.runs.tables import remove_step, remove_steps, tables_of
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
        _try_until_done(job, log)
    except KeyboardInterrupt as stop:
        message = f"stopped by the user after {log.steps} of {job.config.run.steps} steps; what was written is whole"
        log.end(Status.INTERRUPTED, message + str(stop))
        raise Interrupted(message + str(stop)) from None
    except BaseException as error:
        log.end(Status.FAILED, f"{type(error).__name__}: {error}")
        raise
    return log.end(Status.COMPLETE, None)


def _try_until_done(job: _Job, log: RunLog) -> None:
    """Try the run until it is complete, or until a failure ends it: see ``Restarts``."""
    config, progress = job.config, log.progress
    restarts = Restarts(config.run.max_restarts, progress.note, log.announce, elastic=config.cluster.elastic)
    log.restarts, groups = restarts.done, _worker_groups(job, progress)
    group: WorkerGroup | None = None
    failure: SiirlError | None = None
    last: Driver | None = None
    with ExitStack() as connection:
        client = connection.enter_context(connect(config, progress))
        try:
            while True:
                try:
                    if isinstance(failure, SchedulerLost):
                        last = None  # what it had built has gone with its workers
                        connection.close()
                        client = connection.enter_context(reconnect(config, progress))
                    group = groups.find(client, group, failure, None if last is None else last.plugin)
                    tried = _prepare(job, log, client, group, groups, last)
                    earlier, last = last, tried.driver
                    _drive(tried, log, client.dashboard_link, restarts, earlier)
                    return
                except SiirlError as error:
                    if not restarts.after(error, log.steps):
                        if (cause := restarts.cause(error)) is error:
                            raise
                        raise cause from error
                    failure = error
                progress.close()
                restarts.pause(failure)
                log.attempt.begin_again()
        finally:
            if last is not None and config.cluster.exists:
                last.close()


def _worker_groups(job: _Job, progress: Progress) -> WorkerGroups:
    """Return what finds the workers of each try."""
    config = job.config
    if not config.cluster.elastic:
        return Fixed(config, progress)

    def plan(group: WorkerGroup) -> Phases:
        hosts = hosts_of(group.members)
        phases = _plan(group.config, job.dag, job.validation, list(group.members), ResumePoint(), hosts)
        check(group.config, phases)
        return phases

    return Elastic(config, plan, job.checked.reads, progress)


@dataclass(frozen=True, slots=True)
class _Try:
    """A try of the run that is planned, and has not begun."""

    driver: Driver
    group: WorkerGroup
    groups: WorkerGroups
    phases: Phases
    prepare_folder: Callable[[], None]
    commits: Commits
    notes: Sequence[str]
    """Sentences for the user."""


def _prepare(
    job: _Job, log: RunLog, client: Client, group: WorkerGroup, groups: WorkerGroups, last: Driver | None
) -> _Try:
    """Find where the run goes on, and plan it for the ``group``; ``last`` had what its workers have built."""
    config, named, dag, fresh = group.config, group.members, job.dag, job.fresh and not log.begun
    resume = verified_resume_point(config, dag, client, named, fresh=fresh, force=job.force)
    log.resume_at(with_stages(config, dag, resume, client, named))
    again = last is not None
    phases = _plan(config, dag, job.validation, list(named), log.resume, hosts_of(named), again=again)
    check_reachable(client, named, phases, job.checked.reads, config.run.url)
    fetch_on_workers(client, config.cluster, named, phases[Phase.TRAIN][0], job.checked.reads, job.models, log.progress)
    checked = job.checked if config is job.config else check(config, phases)  # other workers hold other shares
    store = DistributedCheckpoint(config.checkpoint.asynchronous)
    follows = None if last is None else last.plugin
    spec = RunSpec.of(
        config,
        named,
        phases,
        log.attempt.number,
        store,
        log.resume.checkpoint,
        follows,
        log.resume.kept,
        models=job.models,
        footprints=checked.footprints,
    )
    keep, best = config.checkpoint.keep, config.checkpoint.keep_best
    checkpoints = Checkpoints(attempt=log.attempt, keep=keep, keep_best=best, done=log.resume.done)
    lookahead = config.run.lookahead + (config.rollout.steps_ahead or 0)
    stall_timeout, on_progress = config.cluster.stall_timeout, log.progress.under_way
    on_idle = groups.look(client, group, spec.plugin)
    driver = Driver(client, spec, lookahead, stall_timeout, checkpoints.folder, on_progress, on_idle)
    prepare_folder = partial(_prepare_folder, job.config, dag, job.validation, log)
    train = phases[Phase.TRAIN]
    cuts = {cut.table: cut for cut in frontiers(dag, train[0].stages)[0]}
    kept = [node.kept_as for node in dag.nodes if node.kept_as]
    commits = Commits(checkpoints, log, RunIdentity.of(config, dag).digest(), cuts, kept)
    noted = config.observe.progress and not again
    notes = [*host_notes(train[0]), *notes_on_long_prompts(config, *train)] if noted else []
    return _Try(driver, group, groups, phases, prepare_folder, commits, notes)


def _note_start(log: RunLog) -> None:
    cluster = log.config.cluster
    log.progress.note(f"starting {cluster.workers} workers{f' as {cluster.spec} says' if cluster.spec else ''}")
    if log.config.rollout.engine is Engine.auto:
        log.progress.note(f"rollout.engine=auto takes {choose_engine(Engine.auto)}")


def _drive(tried: _Try, log: RunLog, dashboard: str, restarts: Restarts, earlier: Driver | None) -> None:
    """Have the driver run every iteration, and log or commit each as it is done."""
    config, resume, driver, workers = log.config, log.resume, tried.driver, len(tried.group.members)
    log.workers, step_done = workers, time.monotonic()
    with driver.at_work(config.cluster, lambda error: restarts.after(error, log.steps), earlier):
        tried.prepare_folder()
        log.begin(dashboard)
        for note in tried.notes:
            log.progress.note(note)
        restarts.at_work(log.resume.done, workers, sum(map(bool, driver.kept.values())))
        before = driver.traffic()
        with Preemption(config.run.grace if config.checkpoint.every else 0.0, log.progress.note) as preemption:
            planned = iterations(config, list(tried.phases), resume.done, resume.stages, resume.measured)
            for event in driver.run(preemption.cut(tried.groups.cut(planned))):
                if isinstance(event, Done):
                    log.record(event)
                    step_done = step_done if event.iteration.phase is Phase.CHECKPOINT else time.monotonic()
                else:
                    tried.commits.commit(event)
        after = driver.traffic()
        log.scheduler_bytes = None if before is None or after is None else after - before
        if not preemption.asked:
            tried.groups.check(log.steps, step_done)
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
    train, dataset = phases[Phase.TRAIN]
    replays = {
        replay_plan(table): compile_chains(cut.dag, workers, NO_DATA, config.cluster.placement, hosts)
        for table, cut in resume.cuts.items()
    }
    for phase, one in alike({str(Phase.TRAIN): train, **replays}).items():
        phases[phase] = (one, dataset)
    return phases


def _prepare_folder(config: Config, dag: DAG, validation: DAG | None, log: RunLog) -> None:
    """Remove files of an earlier start that no longer count, and write the run's identity. Fenced if it is too late."""
    url, tables, resume = config.run.url, tables_of([dag, validation]), log.resume
    log.attempt.check()
    if resume.fresh:
        remove_run(url, tables)
    elif resume.exists:
        remove_steps(url, tables, resume.last)
        for step, table in resume.unusable:
            remove_step(log.attempt, table, step)
        remove_summary(url)
    write_identity(config, dag, replace=resume.exists)
