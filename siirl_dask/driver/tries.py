"""Prepares a try of a run: finds where it goes on, plans it for the workers that there are, and makes its driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from distributed import Client

from siirl_dask.config import Config, TrainerConfig
from siirl_dask.driver.commits import Commits
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.models import Models, fetch_on_workers
from siirl_dask.driver.number_type import OpenTypes
from siirl_dask.driver.phases import Phases, data_versions, due_tables, plan_phases
from siirl_dask.driver.preflight import Checked, check
from siirl_dask.driver.processes import hosts_of
from siirl_dask.driver.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.reachable import check_reachable
from siirl_dask.driver.resume import ResumePoint, check_nothing_lost, check_same_data, weights_dag
from siirl_dask.driver.stages import with_stages
from siirl_dask.driver.verification import verified_resume_point
from siirl_dask.driver.who_waits import node_timeout
from siirl_dask.driver.worker_group import WorkerGroup, WorkerGroups
from siirl_dask.errors import ConfigError
from siirl_dask.planner import DAG, NO_DATA, Hosts, Phase, compile_chains, frontiers, replay_plan
from siirl_dask.planner.contract import options_of
from siirl_dask.planner.inputs import alike
from siirl_dask.planner.placement import host_notes
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.folder import RunIdentity, remove_run, remove_summary, write_identity
from siirl_dask.runs.tables import remove_step, remove_steps, tables_of
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.worker.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Job:
    """A run as the user wants it, which has been checked."""

    config: Config
    dag: DAG
    validation: DAG | None
    checked: Checked
    models: Models
    fresh: bool
    force: bool
    open_types: OpenTypes | None = None
    """The run before ``model.dtype=auto`` was decided, and what was; None where no model had that type."""


@dataclass(frozen=True, slots=True)
class Try:
    """A try of the run that is planned, and has not begun."""

    driver: Driver
    group: WorkerGroup
    groups: WorkerGroups
    phases: Phases
    prepare_folder: Callable[[], None]
    commits: Commits
    notes: Sequence[str]
    """Sentences for the user."""


def prepare_try(
    job: Job, log: RunLog, client: Client, group: WorkerGroup, groups: WorkerGroups, last: Driver | None
) -> Try:
    """Find where the run goes on, and plan it for the ``group``; ``last`` had what its workers have built."""
    config, named, dag, fresh = group.config, group.members, job.dag, job.fresh and not log.begun
    resume = verified_resume_point(config, dag, client, named, fresh=fresh, force=job.force)
    log.resume_at(with_stages(config, dag, resume, client, named))
    check_nothing_lost(config.run.url, log.resume, (node.save_as for node in dag.nodes if node.save_as))
    again = last is not None
    phases = plan_run(config, dag, job.validation, list(named), log.resume, hosts_of(named), again=again)
    train = phases[Phase.TRAIN]
    changes = check_same_data(config.run.url, log.resume, data_versions(phases), force=job.force)
    check_reachable(client, named, phases, job.checked.reads, config.run.url)
    fetch_on_workers(client, config.cluster, named, train[0], job.checked.reads, job.models, log.progress)
    keep, best = config.checkpoint.keep, config.checkpoint.keep_best
    checkpoints = Checkpoints(attempt=log.attempt, keep=keep, keep_best=best, done=log.resume.done)
    driver = _driver(job, log, client, group, groups, phases, checkpoints, last)
    cuts = {cut.table: cut for cut in frontiers(dag, train[0].stages)[0]}
    kept = [node.kept_as for node in dag.nodes if node.kept_as]
    commits = Commits(checkpoints, log, RunIdentity.of(config, dag).digest(), cuts, kept)
    notes = [f"data       {change}" for change in changes]
    if job.open_types is not None and not again:
        notes.append(job.open_types.expected.note)
    if config.observe.progress and not again:
        notes += [*host_notes(train[0]), *notes_on_long_prompts(config, *train), *job.checked.row_notes]
    return Try(driver, group, groups, phases, partial(_prepare_folder, job, log, phases), commits, notes)


def _driver(
    job: Job,
    log: RunLog,
    client: Client,
    group: WorkerGroup,
    groups: WorkerGroups,
    phases: Phases,
    checkpoints: Checkpoints,
    last: Driver | None,
) -> Driver:
    config, resume = group.config, log.resume
    checked = job.checked if config is job.config else check(config, phases)  # other workers hold other shares
    spec = RunSpec.of(
        config,
        group.members,
        phases,
        log.attempt.number,
        DistributedCheckpoint(config.checkpoint.asynchronous),
        resume.checkpoint,
        None if last is None else last.plugin,
        resume.kept,
        models=job.models,
        footprints=checked.footprints,
    )
    lookahead = config.run.lookahead + (config.rollout.steps_ahead or 0)
    stall_timeout, on_progress = config.cluster.stall_timeout, log.progress.under_way
    on_idle = groups.on_idle(client, group, spec.plugin)
    folder, nodes = checkpoints.folder, node_timeout(config)
    return Driver(client, spec, lookahead, stall_timeout, folder, on_progress, on_idle, nodes)


def plan_run(
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

    So does one that is tried ``again`` from the beginning: engines that were kept have newer weights. And so does one
    whose policy begins with adapters (``trainer.lora.path``), which engines have not read.
    """
    phases = plan_phases(config, dag, validation, workers, hosts, assume_columns=assume)
    if (best := config.checkpoint.keep_best) and best.partition("/")[0] not in phases:
        raise ConfigError(f"checkpoint.keep_best={best!r}: there is no validation; give validation.url")
    if (resume.done or again or _begins_with_adapters(dag)) and (loading := weights_dag(dag)) is not None:
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


def _begins_with_adapters(dag: DAG) -> bool:
    trainers = [options_of(role.build).get("trainer") for role in dag.roles]
    return any(isinstance(trainer, TrainerConfig) and trainer.lora.path is not None for trainer in trainers)


def _prepare_folder(job: Job, log: RunLog, phases: Phases) -> None:
    """Remove files of an earlier start that no longer count, and write the run's identity. Fenced if it is too late."""
    url, tables, resume = job.config.run.url, tables_of([job.dag, job.validation]), log.resume
    log.attempt.check()
    if resume.fresh:
        remove_run(url, tables)
    elif resume.exists:
        remove_steps(url, tables, resume.last)
        for step, table in resume.unusable:
            remove_step(log.attempt, table, step)
        remove_summary(url)
    tables_due = due_tables(job.config, phases, resume.last)
    write_identity(job.config, job.dag, replace=resume.exists, data=data_versions(phases), tables=tables_due)
