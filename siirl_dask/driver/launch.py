"""Prepares a launch of a run: finds where it goes on, plans it for the workers that there are,
and makes its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from distributed import Client

from siirl_dask.config import Config, Dtype, TrainerConfig
from siirl_dask.driver.caller import RunCaller
from siirl_dask.driver.checks.number_type import OpenTypes
from siirl_dask.driver.checks.preflight import Checked, check
from siirl_dask.driver.checks.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.checks.reachable import check_reachable
from siirl_dask.driver.clusters.processes import hosts_of
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.models import Models, fetch_on_workers
from siirl_dask.driver.phases import (
    Phases,
    data_versions,
    due_tables,
    model_versions,
    plan_phases,
)
from siirl_dask.driver.recovery.commits import Commits
from siirl_dask.driver.recovery.resume import (
    ResumePoint,
    check_nothing_lost,
    check_same_data,
    weights_dag,
)
from siirl_dask.driver.recovery.stored_steps import with_stages
from siirl_dask.driver.recovery.verification import verified_resume_point
from siirl_dask.driver.recovery.worker_group import WorkerGroup, WorkerGroups
from siirl_dask.driver.who_waits import node_timeout
from siirl_dask.errors import ConfigError
from siirl_dask.planner import (
    DAG,
    NO_DATA,
    Hosts,
    Phase,
    compile_chains,
    frontiers,
    host_notes,
    options_of,
    replay_plan,
)
from siirl_dask.planner.inputs import alike
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
    caller: RunCaller = field(default_factory=RunCaller)
    open_types: OpenTypes | None = None
    """The run before ``model.dtype=auto`` was decided, and what was; None where no model had
    that type."""


def with_decided_type(open_types: OpenTypes, dtype: Dtype) -> tuple[Config, DAG, DAG | None]:
    """Return the configuration and the DAGs with ``dtype`` in place of ``auto``."""
    config, dags = open_types.decide(dtype)
    validation = None
    if len(dags) > 1:
        validation = dags[1]
    return config, dags[0], validation


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of the run that is planned, and has not begun. A restart is another launch of the
    same job.
    """

    driver: Driver
    group: WorkerGroup
    groups: WorkerGroups
    phases: Phases
    prepare_folder: Callable[[], None]
    commits: Commits
    notes: Sequence[str]
    """Sentences for the user."""


def prepare_launch(
    job: Job,
    log: RunLog,
    client: Client,
    *,
    group: WorkerGroup,
    groups: WorkerGroups,
    previous: Driver | None,
) -> Launch:
    """Find where the run goes on, and plan it for the ``group``; its workers still have the
    roles of ``previous``.
    """
    config = group.config
    dag = job.dag
    members = group.members
    resume = verified_resume_point(
        config, dag, client, members, fresh=job.fresh and not log.begun, force=job.force
    )
    log.resume_at(with_stages(config, dag, resume, client, members))
    saved_tables = [node.save_as for node in dag.nodes if node.save_as]
    check_nothing_lost(config.run.url, log.resume, saved_tables)
    phases = plan_run(
        config,
        dag,
        job.validation,
        workers=list(members),
        resume=log.resume,
        hosts=hosts_of(members),
        relaunched=previous is not None,
    )
    train, dataset = phases[Phase.TRAIN]
    changes = check_same_data(
        config.run.url,
        log.resume,
        data_versions(phases),
        model_versions(config),
        force=job.force,
    )
    check_reachable(client, members, phases, job.checked.reads, config.run.url)
    fetch_on_workers(
        client,
        config.cluster,
        members,
        plan=train,
        reads=job.checked.reads,
        models=job.models,
        progress=log.progress,
    )
    checkpoints = Checkpoints(
        attempt=log.attempt,
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        done=log.resume.done,
    )
    commits = Commits(
        checkpoints,
        log,
        digest=RunIdentity.of(config, dag).digest(),
        cuts={cut.table: cut for cut in frontiers(dag, train.flow)[0]},
        state_tables=[node.state_table for node in dag.nodes if node.state_table],
    )
    notes = [f"data       {change}" for change in changes]
    if previous is None and job.open_types is not None:
        notes.append(job.open_types.expected.note)
    if previous is None and config.observe.progress:
        notes += host_notes(train)
        notes += notes_on_long_prompts(config, train, dataset)
        notes += job.checked.row_notes
    return Launch(
        driver=_driver(
            job,
            log,
            client,
            group=group,
            groups=groups,
            phases=phases,
            checkpoints=checkpoints,
            previous=previous,
        ),
        group=group,
        groups=groups,
        phases=phases,
        prepare_folder=partial(_prepare_folder, job, log, phases),
        commits=commits,
        notes=notes,
    )


def _driver(
    job: Job,
    log: RunLog,
    client: Client,
    *,
    group: WorkerGroup,
    groups: WorkerGroups,
    phases: Phases,
    checkpoints: Checkpoints,
    previous: Driver | None,
) -> Driver:
    config = group.config
    checked = job.checked
    if config is not job.config:
        checked = check(config, phases)  # other workers hold other shares
    spec = RunSpec.of(
        config,
        group.members,
        phases,
        attempt=log.attempt.number,
        store=DistributedCheckpoint(config.checkpoint.asynchronous),
        resume_from=log.resume.resume_from,
        follows=None if previous is None else previous.plugin,
        stored_state=log.resume.stored_state,
        models=job.models,
        footprints=checked.footprints,
    )
    steps_ahead = 0
    if config.rollout.steps_ahead is not None:
        steps_ahead = config.rollout.steps_ahead
    return Driver(
        client,
        spec,
        lookahead=config.run.lookahead + steps_ahead,
        stall_timeout=config.cluster.stall_timeout,
        folder=checkpoints.folder,
        on_progress=log.progress.under_way,
        on_idle=groups.on_idle(client, group, spec.plugin),
        node_timeout=node_timeout(config),
        check=job.caller.stop.check,
        resources=config.cluster.resources,
    )


def plan_run(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    *,
    workers: Sequence[str],
    resume: ResumePoint,
    hosts: Hosts | None = None,
    assume_columns: bool = False,
    relaunched: bool = False,
) -> Phases:
    """Plan the phases of the run.

    A run whose engines begin with other weights than its policy gets one phase more, which loads
    the policy's weights into the engines. That is a resumed run; one that is ``relaunched`` from
    the beginning, whose reused engines have newer weights; and one whose policy begins with
    adapters (``trainer.lora.path``), which engines have not read.

    With ``assume_columns`` an absent dataset is assumed to have the columns that the configuration
    names.
    """
    phases = plan_phases(config, dag, validation, workers, hosts, assume_columns=assume_columns)
    best = config.checkpoint.keep_best
    if best and best.partition("/")[0] not in phases:
        raise ConfigError(
            f"checkpoint.keep_best={best!r}: there is no validation; give validation.url"
        )
    train, dataset = phases[Phase.TRAIN]
    placement = config.cluster.placement
    if resume.done or relaunched or _begins_with_adapters(dag):
        loading = weights_dag(dag)
        if loading is not None:
            loading_plan = compile_chains(loading, workers, NO_DATA, placement, hosts)
            phases[Phase.WEIGHTS] = (loading_plan, dataset)
    plans = {str(Phase.TRAIN): train}
    for table, cut in resume.cuts.items():
        plans[replay_plan(table)] = compile_chains(cut.dag, workers, NO_DATA, placement, hosts)
    for phase, plan in alike(plans).items():
        phases[phase] = (plan, dataset)
    return phases


def _begins_with_adapters(dag: DAG) -> bool:
    for role in dag.roles:
        trainer = options_of(role.build).get("trainer")
        if isinstance(trainer, TrainerConfig) and trainer.lora.path is not None:
            return True
    return False


def _prepare_folder(job: Job, log: RunLog, phases: Phases) -> None:
    """Remove files of an earlier start that no longer count, and write the run's identity.
    Fenced if it is too late.
    """
    url = job.config.run.url
    tables = tables_of([job.dag, job.validation])
    resume = log.resume
    log.attempt.check()
    if resume.fresh:
        remove_run(url, tables)
    elif resume.exists:
        remove_steps(url, tables, resume.last)
        for step, table in resume.unusable:
            remove_step(log.attempt, table, step)
        remove_summary(url)
    write_identity(
        job.config,
        job.dag,
        replace=resume.exists,
        data=data_versions(phases),
        models=model_versions(job.config),
        tables=due_tables(job.config, phases, resume.last),
    )
