"""Checks a run before it starts; ``run``, ``plan`` and ``eval`` all call ``check``, and nothing
else checks.

A role's needs are declared beside its builder (``@builds(preflight=...)``), a node's options beside
its function (``@columns(trial=...)``). This module knows no role, no algorithm and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature

from siirl_storage import StorageError

from siirl_dask.config import ClusterConfig, Config, DevicePreference, RolloutConfig
from siirl_dask.context import DeviceKind
from siirl_dask.coordinator import Source, exists, open_source
from siirl_dask.devices.accelerator import visible_devices
from siirl_dask.driver.checks.prompt_rows import check_rows, encodes_dataset, may_be_answered
from siirl_dask.driver.checks.reachable import check_model_folders
from siirl_dask.driver.checks.weight_sync import check_weight_sync, transfer_notes
from siirl_dask.driver.doctor.packages import refuse_older
from siirl_dask.driver.phases import Phases
from siirl_dask.errors import ConfigError, DataError, PlanError, UserError, counted, did_you_mean
from siirl_dask.estimates.device_memory import cards_of, check_devices, device_memory, footprints_of
from siirl_dask.estimates.memory import WorkerMemory, check_memory, memory_of
from siirl_dask.estimates.memory_shortage import MemoryShortage, find_shortage
from siirl_dask.models.remote import UnreachableModelError
from siirl_dask.nodes import check_expected_lengths
from siirl_dask.observe.backends import check_backends, missing_backends
from siirl_dask.planner import (
    DAG,
    Footprint,
    Node,
    Plan,
    Role,
    RoleCost,
    bare,
    dag_to_spec,
    host_notes,
    options_of,
    preflight_of,
    provides_of,
    short_name,
)
from siirl_dask.schema import path_steps, type_at
from siirl_dask.tables import values_at
from siirl_dask.wording import worker_ranges
from siirl_dask.worker.run_spec import serialize_phases


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of the checks that a plan shows."""

    memory: list[WorkerMemory]
    """The host's memory."""
    notes: list[str]
    """Sentences for the reader of a plan."""
    reads: Mapping[str, tuple[str, ...]]
    """Folders that the workers of each role read."""
    footprints: Mapping[str, Footprint]
    """Memory of each role on an accelerator, as far as it is known."""
    row_notes: list[str]
    """Sentences among the notes that are about rows of the datasets."""
    shortage: MemoryShortage | None
    """Memory that the workers may need of this machine beyond what there is; None where they fit."""

    @property
    def warnings(self) -> list[str]:
        """Sentences that nobody should overlook."""
        if self.shortage is None:
            return []
        return [f"{self.shortage.text}; {self.shortage.cure}"]


def check(config: Config, phases: Phases, *, is_plan: bool = False) -> Checked:
    """Raise ConfigError, DataError or PlanError for a run that cannot work, as far as is known
    before it starts.

    Datasets and models that are absent are not looked into. With ``is_plan``, for a reader who is
    shown what to change, a run passes whose roles do not fit on accelerators of
    ``cluster.device_memory``, and one whose models' stores cannot be reached from here.
    """
    refuse_older()
    plan, _ = next(iter(phases.values()))
    if config.cluster.spec:
        # Dask, which `plan` need not wait for
        from siirl_dask.driver.clusters.deployment import check_spec

        check_spec(config.cluster.spec)
    if config.cluster.resources and not is_plan:
        check_resources(config.cluster)
    serialize_phases(phases)
    for phase_plan, _ in phases.values():
        if is_plan:
            dag_to_spec(
                phase_plan.dag
            )  # a run writes it down, and refuses functions without a name
        for node in phase_plan.dag.nodes:
            node.try_options()
        _check_lone_samples(phase_plan.dag)
    check_weight_sync(config, plan)
    _check_expected_lengths(config, phases)
    costs = {role.name: _check_role(role, plan, config, is_plan) for role in plan.dag.roles}
    reads = {name: cost.reads for name, cost in costs.items()}
    check_model_folders(reads)
    _check_requirements(plan.dag, costs)
    for phase_plan, _ in phases.values():
        _check_columns(phase_plan.dag, costs)
    _check_together(plan, costs)
    _check_processes(plan, costs)
    footprints = footprints_of(costs)
    accelerator = device_memory(config)
    if not is_plan:
        check_devices(accelerator, cards_of(plan, footprints))
    memory = memory_of(config, phases, costs, accelerators=accelerator is not None)
    check_memory(config, memory)
    shortage: MemoryShortage | None = None
    computes_here = _computes_on_accelerators(config)
    if accelerator is None and computes_here:
        shortage = find_shortage(config, memory_of(config, phases, costs, accelerators=True))
    elif accelerator is None or computes_here:  # else the run is planned for another machine
        shortage = find_shortage(config, memory)
    row_notes = [*_notes_on_rows(phases), *_notes_on_batch(config, phases)]
    return Checked(
        memory=memory,
        notes=[*_notes(plan, costs), *host_notes(plan), *transfer_notes(config, plan), *row_notes],
        reads=reads,
        footprints=footprints,
        row_notes=row_notes,
        shortage=shortage,
    )


def _computes_on_accelerators(config: Config) -> bool:
    """Return whether workers that are started here take accelerators of this machine."""
    if config.cluster.device is DevicePreference.cpu:
        return False
    return visible_devices().kind is not DeviceKind.CPU


def _notes_on_rows(phases: Phases) -> list[str]:
    """Return sentences on rows of datasets that are there. DataError for a prompt that is null,
    or has its answer.
    """
    notes = []
    for plan, dataset in phases.values():
        if all(source.table or exists(source.url) for source in dataset.sources):
            notes += check_rows(
                dataset,
                answered=may_be_answered(plan.dag),
                encoded=encodes_dataset(plan.dag),
            )
    return list(dict.fromkeys(notes))


def _notes_on_batch(config: Config, phases: Phases) -> list[str]:
    """Return a sentence where a step takes more prompts than the dataset that is there has."""
    _, dataset = next(iter(phases.values()))
    if len(dataset.sources) > 1:
        return []
    (source,) = dataset.sources
    if not source.table and not exists(source.url):
        return []
    rows = open_source(source).num_rows
    if rows >= config.data.batch_size:
        return []
    return [
        f"data.batch_size={config.data.batch_size} is more than the {counted(rows, 'row')} of "
        f"dataset {source.url!r}: each step has prompts several times"
    ]


def check_resources(cluster: ClusterConfig) -> None:
    """Raise ConfigError for Dask resources of workers that cannot have any."""
    if not cluster.exists and not cluster.spec:
        raise ConfigError(
            f"cluster.resources={cluster.resources}: workers that the run starts on this machine "
            "have no resources; name a cluster whose workers have them, or leave it out"
        )


def _check_lone_samples(dag: DAG) -> None:
    """Raise ConfigError for a node that compares the samples of a prompt where each prompt has
    one.
    """
    for node in dag.nodes:
        learns_alone = node.contract.learns_alone
        if learns_alone is None or _samples(dag, node) != 1 or learns_alone(**node.options):
            continue
        advantage = node.options.get("advantage")
        compares = f"rollout.n=1: node {node.name!r} compares the samples of a prompt"
        if advantage is None:
            raise ConfigError(
                f"{compares} ({short_name(bare(node.fn))}), and each prompt has one, so that it "
                "does nothing; expected rollout.n of at least 2, or a DAG without this node"
            )
        raise ConfigError(
            f"{compares} ({short_name(bare(advantage))}), and each prompt has one, so that no "
            "answer is better or worse than another and nothing is learned; expected rollout.n of "
            "at least 2, or an advantage that compares with something else, as remax, gae, "
            "reinforce_plus_plus and, of turns, turn_gae do (docs/algorithms.md)"
        )


def _samples(dag: DAG, node: Node) -> int | None:
    """Return how many samples of a prompt reach a node.

    None where a node before it makes rows otherwise, and where none makes any: a replay's rows come
    from storage.
    """
    before = set(node.after)
    samples: int | None = None
    for other in reversed(dag.ordered()):
        if other.name not in before:
            continue
        before.update(other.after)
        if other.contract.expand is None:
            continue
        rollout = other.options.get("rollout")
        if not isinstance(rollout, RolloutConfig) or "validation" in other.options:
            return None
        samples = rollout.n if samples is None else samples * rollout.n
    return samples


def _check_role(role: Role, plan: Plan, config: Config, is_plan: bool) -> RoleCost:
    """Run the role's own preflight; its errors name the role."""
    preflight = preflight_of(role.build)
    if preflight is None:
        note = (
            f"{short_name(role.build)} declares no preflight (@builds): it is not checked, its "
            "memory not counted"
        )
        return RoleCost(notes=(note,))
    try:
        return preflight(options_of(role.build), plan.placement[role.name], config)
    except UnreachableModelError as error:
        if not is_plan:
            raise ConfigError(f"role {role.name!r}: {error}") from error
        return RoleCost(notes=(f"{error}; its memory is not counted, and a run needs it",))
    except UserError as error:
        raise type(error)(f"role {role.name!r}: {error}") from error


_PROVIDED_BY = {
    "adapters": "a lora.rank",
    "averages": "an ema_decay, or an ema_every above 1, with the backend torch or fsdp",
}


def _check_requirements(dag: DAG, costs: Mapping[str, RoleCost]) -> None:
    """Raise ConfigError for a node whose role does not provide what the node's function
    requires.
    """
    for node in dag.nodes:
        provided = costs[node.role].provides | provides_of(dag.role(node.role).build)
        missing = sorted(set(node.contract.requires) - provided)
        if missing:
            options = " and ".join(
                _PROVIDED_BY.get(ability, f"what provides {ability}") for ability in missing
            )
            raise ConfigError(
                f"node {node.name!r} runs {short_name(node.fn)}, which needs a role with "
                f"{', '.join(missing)}, and "
                f"role {node.role!r} has none: give its trainer {options}, or leave the node out"
            )


def _check_columns(dag: DAG, costs: Mapping[str, RoleCost]) -> None:
    """Raise PlanError for a node that does not pass the function of its role a column that this
    has no default for.
    """
    for node in dag.nodes:
        if "columns" not in signature(bare(node.fn)).parameters or node.role not in costs:
            continue
        passed = node.options.get("columns", ())
        missing = sorted(costs[node.role].columns - set(passed))
        if missing:
            wanted = ", ".join([*passed, *missing])
            raise PlanError(
                f"node {node.name!r}: the function of role {node.role!r} needs "
                f"{', '.join(missing)}, and the node passes it the columns {[*passed]}: give it "
                f"the dataset's as nodes: {{{node.name}: {{with: {{columns: [{wanted}]}}}}}}, or "
                "the argument a default"
            )


def _check_together(plan: Plan, costs: Mapping[str, RoleCost]) -> None:
    """Raise PlanError for roles that share an object and are on different workers."""
    first: dict[str, str] = {}
    for role, cost in costs.items():
        if not cost.together:
            continue
        other = first.setdefault(cost.together, role)
        if plan.placement[role] != plan.placement[other]:
            places = {
                name: worker_ranges(plan.placement[name], tuple(plan.chains))
                for name in (other, role)
            }
            raise PlanError(
                f"roles {other!r} and {role!r} hold {cost.together} together, and are on workers "
                f"{places[other]} and {places[role]}: expected the same ones, in the same order; "
                "change cluster.placement"
            )


def _check_processes(plan: Plan, costs: Mapping[str, RoleCost]) -> None:
    """Raise PlanError for roles on one worker that need different kinds of process."""
    first: dict[str, str] = {}
    for role, cost in costs.items():
        if not cost.process:
            continue
        for worker in plan.placement[role]:
            other = first.setdefault(worker, role)
            if costs[other].process != costs[role].process:
                raise PlanError(
                    f"roles {other!r} and {role!r} are both on worker {worker}, whose process "
                    f"would be made into {costs[other].process} and {costs[role].process}: give "
                    "both the same options (trainer.operators, critic.operators), or workers of "
                    "their own (cluster.placement)"
                )


def _notes(plan: Plan, costs: Mapping[str, RoleCost]) -> list[str]:
    workers = tuple(plan.chains)
    busy = {worker for placed in plan.placement.values() for worker in placed}
    notes = []
    idle = [worker for worker in workers if worker not in busy]
    if idle:
        notes.append(
            f"workers {worker_ranges(idle, workers)} have nothing to do: cluster.placement gives "
            "every role other ones"
        )
    roles: dict[str, list[str]] = {}
    for name, cost in costs.items():
        for note in cost.notes:
            roles.setdefault(note, []).append(repr(name))
        if cost.memory is None and not cost.notes:
            notes.append(
                f"role {name!r}: its model is not on this machine, so its memory is not counted"
            )
    for note, names in roles.items():
        subject = "roles"
        if len(names) == 1:
            subject = "role"
        notes.append(f"{subject} {', '.join(names)}: {note}")
    return notes


def check_observation(config: Config, plan: Plan, *, is_plan: bool = False) -> list[str]:
    """Raise ConfigError for backends of metrics that are not installed, and for an unusable
    ``profile``. With ``is_plan`` return a sentence on each such backend instead: a run may start
    elsewhere.

    ``plan`` is the one that the run begins with. It is not part of ``check``: a run that has lost
    workers goes on without their profiles, and an evaluation has neither.
    """
    _check_profile(config, plan)
    if not is_plan:
        check_backends(config.observe.backends)
    return missing_backends(config.observe.backends)


def _check_profile(config: Config, plan: Plan) -> None:
    """Raise ConfigError for steps, roles and ranks of ``profile`` that the run does not have."""
    profile = config.profile
    steps = config.run.steps
    late = [step for step in profile.steps if step > steps]
    if late:
        raise ConfigError(
            f"profile.steps={profile.steps}: step {late[0]} is none of 1 to run.steps={steps}"
        )
    roles = list(plan.placement)
    for role in profile.roles:
        if role not in roles:
            near = did_you_mean(role, roles)
            raise ConfigError(
                f"profile.roles={profile.roles}: the DAG has no role {role!r} (it has "
                f"{roles}){near}"
            )
    most = max((len(plan.placement[role]) for role in profile.roles or roles), default=0)
    outside = [rank for rank in profile.ranks if rank >= most]
    if profile.steps and outside:
        raise ConfigError(
            f"profile.ranks={profile.ranks}: rank {outside[0]} is on no worker; "
            f"{'these roles have' if profile.roles else 'roles have'} ranks from 0 to {most - 1}"
        )


def _check_expected_lengths(config: Config, phases: Phases) -> None:
    """Raise ConfigError or DataError for an unusable ``rollout.expected_length_column``.

    ConfigError if no training node reads the column; DataError if the training dataset lacks it, or
    if any dataset has values in it other than whole numbers of at least 1.
    """
    column = config.rollout.expected_length_column
    if column is None:
        return
    first = next(iter(phases))
    nodes = phases[first][0].dag.nodes
    if not any(column in (*node.contract.reads, *node.contract.optional) for node in nodes):
        raise ConfigError(
            f"rollout.expected_length_column={column!r} and no node reads that column: give the "
            "node that runs "
            "siirl_dask.nodes:encode_prompts the rollout as well, as in with: {rollout: "
            "${rollout}, ...}"
        )
    for phase, (_, dataset) in phases.items():
        for source in dataset.sources:
            if source.table or exists(source.url):
                _check_column(source, column, required=phase is first)


def _check_column(source: Source, column: str, *, required: bool) -> None:
    snapshot = open_source(source)
    label = f"rollout.expected_length_column={column!r}: that column of dataset {source.url!r}"
    known = snapshot.schema.names
    if type_at(snapshot.schema, column) is None:
        if required:
            raise DataError(
                f"{label} is not there (there is: {known}){did_you_mean(column, known)}"
            )
        return
    name = path_steps(column, known)[0]
    first = 0
    for group in snapshot.row_groups():
        try:
            table = snapshot.read_row_group(group, [name], max_bytes=source.read_limit)
        except StorageError as error:
            raise DataError(f"dataset {source.url!r}: {error}") from error
        check_expected_lengths(values_at(table, column), label, first)
        first += group.rows
