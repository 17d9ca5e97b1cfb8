"""Runs a DAG without training and checkpoints: once over a dataset, or over rows that a run
stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from distributed import Client
from siirl_storage import absolute, set_retry_seconds

from siirl_dask.config import Config, Dtype
from siirl_dask.coordinator import Dataset, Source, dataset_schema, opened, training_dataset
from siirl_dask.driver.checks.number_type import OpenTypes, expected_dtype, is_open
from siirl_dask.driver.checks.preflight import Checked, check
from siirl_dask.driver.checks.prompt_lengths import notes_on_long_prompts
from siirl_dask.driver.checks.prompts import check_prompts
from siirl_dask.driver.checks.reachable import check_reachable
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.clusters.cluster import connect
from siirl_dask.driver.clusters.processes import hosts_of, members
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.iterations import CompletedIteration
from siirl_dask.driver.models import Models, fetch_here, fetch_on_workers, find_models, forgotten
from siirl_dask.driver.phases import Phases, worker_names
from siirl_dask.driver.recovery.replacement import await_free_workers
from siirl_dask.driver.who_waits import node_timeout
from siirl_dask.errors import Interrupted, counted
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import Progress, announce, values
from siirl_dask.planner import DAG, NO_DATA, Hosts, Iteration, Phase, Plan, Role, compile_chains
from siirl_dask.rollout import servers_go_on
from siirl_dask.runs.checkpoints import Checkpoint
from siirl_dask.runs.folder import check_writable
from siirl_dask.schema import Schema
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from siirl_dask.worker.roles.lazy_role import StoredStates, built_when_used
from siirl_dask.worker.roles.role_state import ResumeFrom
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.tasks import models_of


@dataclass(frozen=True, slots=True)
class StoredPass:
    """Steps whose stored rows are run through a DAG again, with the same weights."""

    steps: Sequence[int]
    checkpoint: Checkpoint | None
    """States that the roles get when a node asks for them; None for those they are built with."""


def one_pass(
    config: Config,
    dag: DAG,
    source: Source,
    step: int,
    *,
    passing: Collection[str] = (),
) -> dict[str, float | None]:
    """Run every worker through ``dag`` once, over all of ``source``, and return the logged metrics.

    Tables that the nodes save lie below ``run.url`` under ``step``, which is also part of the
    samples' seeds. ``passing`` are models that nobody uses afterwards: hosts that fetched them
    delete their copies. UserError before anything starts; Interrupted on Ctrl-C.
    """
    dataset = opened(source)
    passes = _passes(
        config,
        [(dag, [step])],
        dataset,
        dataset_schema(dataset),
        passing=passing,
        reads_prompts=True,
    )
    completed, _ = passes[0]
    check_prompts(completed[0], config.data.max_prompt_length)
    return values(completed[0].metrics)


def stored_passes(config: Config, dag: DAG, passes: Sequence[StoredPass]) -> list[list[str]]:
    """Run every worker through ``dag`` on the rows that the run at ``run.url`` stored, one pass
    after the other.

    ``dag`` begins with a node that stands for stored rows (``planner.run_again``). An object of a
    role is built when a node first asks for it. Returns for each pass the roles with a state that
    were built. Errors as in ``one_pass``, and CheckpointError for a checkpoint that cannot be used.
    """
    dataset = training_dataset(config.data, config.run.seed)
    dags = [(DAG(_lazy_roles(dag, each.checkpoint), dag.nodes), each.steps) for each in passes]
    return [built for _, built in _passes(config, dags, dataset, NO_DATA)]


def _lazy_roles(dag: DAG, checkpoint: Checkpoint | None) -> tuple[Role, ...]:
    """Return roles that are built when they are used, with the states of a checkpoint."""
    past = None
    if checkpoint is not None:
        state = checkpoint.state()
        url = absolute(checkpoint.url)  # workers may run in other folders
        resume = ResumeFrom(
            url=url,
            roles=tuple(state.roles),
            states=state.states,
            positions=state.positions,
        )
        past = StoredStates(resume, DistributedCheckpoint(), replace(checkpoint, url=url).verify)
    return tuple(built_when_used(role, past) for role in dag.roles)


def _passes(
    config: Config,
    dags: Sequence[tuple[DAG, Sequence[int]]],
    dataset: Dataset,
    schema: Schema,
    *,
    passing: Collection[str] = (),
    reads_prompts: bool = False,
) -> list[tuple[list[CompletedIteration], list[str]]]:
    """Run each DAG at each of its steps; return the iterations, and the roles with a state that
    were built lazily.

    With ``reads_prompts`` the prompts come from ``dataset``, and the user is warned of those that
    are too long.
    """
    hide()
    open_types: OpenTypes | None = None
    plain_dags = tuple(dag for dag, _ in dags)
    if is_open(config, plain_dags):
        open_types = OpenTypes(config, plain_dags, expected_dtype(config.cluster))
        config, dags = _decided(open_types, open_types.expected.dtype, dags)
    set_retry_seconds(config.storage.retry_seconds)
    progress = Progress(sum(len(steps) for _, steps in dags), enabled=config.observe.progress)
    passes = _Passes(
        config=config,
        dags=dags,
        dataset=dataset,
        schema=schema,
        reads_prompts=reads_prompts,
        open_types=open_types,
        progress=progress,
    )
    checked = passes.check(worker_names(config))
    check_writable(config.run.url)
    models = find_models(checked.reads)
    try:
        fetch_here(models, config.cluster, progress)
        progress.note(f"starting {counted(config.cluster.workers, 'worker')}")
        with (
            servers_go_on(config, progress.note),
            connect(config, progress) as client,
        ):
            return passes.run(client, checked, models, passing)
    except KeyboardInterrupt:
        raise Interrupted("stopped by the user; what was written is whole") from None
    finally:
        progress.close()


@dataclass(slots=True, kw_only=True)
class _Passes:
    """Passes of DAGs on the workers of one cluster."""

    config: Config
    dags: Sequence[tuple[DAG, Sequence[int]]]
    """Each DAG, with its steps."""
    dataset: Dataset
    schema: Schema
    reads_prompts: bool
    open_types: OpenTypes | None
    progress: Progress

    def check(self, workers: list[str], hosts: Hosts | None = None) -> Checked:
        """Check the first DAG as it is planned for the ``workers``."""
        dag, _ = self.dags[0]
        return check(self.config, self._phases(dag, workers, hosts))

    def run(
        self,
        client: Client,
        checked: Checked,
        models: Models,
        passing: Collection[str],
    ) -> list[tuple[list[CompletedIteration], list[str]]]:
        """Run each DAG at each of its steps; models at the URLs ``passing`` are removed from the
        hosts afterwards.
        """
        cluster = self.config.cluster
        taken = await_free_workers(client, cluster, None, self.progress)
        workers = members(client, cluster.workers, resources=cluster.resources, taken=taken)
        names = list(workers)
        hosts = hosts_of(workers)
        if self.open_types is not None:
            number_type = self.open_types.on_workers(client)
            self.progress.note(number_type.note)
            if number_type.dtype is not self.open_types.expected.dtype:
                self.config, self.dags = _decided(self.open_types, number_type.dtype, self.dags)
                checked = self.check(names, hosts)
        first_dag, _ = self.dags[0]
        phases = self._phases(first_dag, names, hosts)
        plan, _ = phases[Phase.EVALUATION]
        check_reachable(client, workers, phases, checked.reads, self.config.run.url)
        passing_models = [model for url, model in models.items() if url in passing]
        with forgotten(client, workers, passing_models):
            fetch_on_workers(
                client,
                cluster,
                workers,
                plan=plan,
                reads=checked.reads,
                models=models,
                progress=self.progress,
            )
            self._note_beginning(client, checked, plan)
            results = []
            for dag, steps in self.dags:
                spec = RunSpec.of(
                    self.config,
                    workers,
                    self._phases(dag, names, hosts),
                    models=models,
                    footprints=checked.footprints,
                )
                results.append(_run_steps(self.config, client, spec, steps, self.progress))
            return results

    def _note_beginning(self, client: Client, checked: Checked, plan: Plan) -> None:
        """Show the user the dashboard's address, warnings, and long prompts."""
        progress = self.progress
        progress.note(f"dask       {client.dashboard_link}")
        for warning in checked.warnings:
            progress.warn(warning)
        progress.begin_pass("evaluation" if self.reads_prompts else "replay")
        if self.reads_prompts and self.config.observe.progress:
            long_prompts = notes_on_long_prompts(self.config, plan, self.dataset)
            for note in [*long_prompts, *checked.row_notes]:
                progress.note(note)

    def _phases(self, dag: DAG, workers: list[str], hosts: Hosts | None) -> Phases:
        config = self.config
        plan = compile_chains(
            dag, workers, self.schema, config.cluster.placement, hosts, overlap=config.run.overlap
        )
        return {Phase.EVALUATION: (plan, self.dataset)}


def _decided(
    open_types: OpenTypes, dtype: Dtype, dags: Sequence[tuple[DAG, Sequence[int]]]
) -> tuple[Config, list[tuple[DAG, Sequence[int]]]]:
    """Return the configuration, and the DAGs with their steps, with ``dtype`` in place of
    ``auto``.
    """
    config, decided = open_types.decide(dtype)
    return config, [(dag, steps) for dag, (_, steps) in zip(decided, dags, strict=True)]


def _run_steps(
    config: Config,
    client: Client,
    spec: RunSpec,
    steps: Sequence[int],
    progress: Progress,
) -> tuple[list[CompletedIteration], list[str]]:
    driver = Driver(
        client,
        spec,
        lookahead=1,
        stall_timeout=config.cluster.stall_timeout,
        folder=_no_checkpoint,
        on_progress=progress.under_way,
        node_timeout=node_timeout(config),
        resources=config.cluster.resources,
    )
    with driver.session(config.cluster, announce):
        iterations = (
            Iteration(Phase.EVALUATION, step, number) for number, step in enumerate(steps)
        )
        completed = [
            event for event in driver.run(iterations) if isinstance(event, CompletedIteration)
        ]
        answers = complete(
            client, lambda: client.run(models_of, spec.plugin, workers=list(spec.members.values()))
        )
    driver.close()  # another pass may follow on the same workers
    built = {role for roles in answers.values() for role in roles}
    return completed, sorted(built)


def _no_checkpoint(step: int) -> str:
    raise AssertionError(f"a pass has no checkpoint, and was asked for that of step {step}")
