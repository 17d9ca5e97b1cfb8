"""Describes a run to its workers: plans and settings, serialized before they start."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import cloudpickle
from siirl_storage import absolute

from siirl_dask.comms.proofs import new_secret
from siirl_dask.config import (
    Affinity,
    Config,
    DevicePreference,
    Durability,
    OnNan,
    ProfileConfig,
    parse_bytes,
)
from siirl_dask.coordinator import Dataset
from siirl_dask.errors import PlanError, RunError, clause
from siirl_dask.models.remote import RemoteModel
from siirl_dask.pickling import dumps, own_modules_by_value
from siirl_dask.planner import Footprint, Plan, PlanInputs, specs_of
from siirl_dask.planner.spec.names import receive_specs
from siirl_dask.worker.peers.data_plane import DataSettings
from siirl_dask.worker.roles.role_state import ResumeFrom, StateStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Everything that a worker needs to know about a run: plans and settings, no data."""

    run: str
    """Unique name of this start of the run; messages of any other start are refused."""
    url: str
    """``run.url``, absolute."""
    seed: int
    members: Mapping[str, str]
    """{worker name: address}, in rank order, fixed for the run."""
    phases: bytes
    """The inputs and the dataset of each plan, from ``serialize_phases``."""
    builds_from: str
    """Name of the plan that has every role that workers build."""
    threads: int
    """Threads of torch in each worker."""
    data: DataSettings
    retry_seconds: float
    """Seconds for which an operation on a store is tried again."""
    secret: bytes = field(default_factory=new_secret, repr=False)
    """Secret of this start of the run: members prove to each other that they know it. It is
    written to no file and no log."""
    device_memory: int | None = None
    """Bytes of each worker's accelerator; None: those that the workers find."""
    cpu: bool = False
    """Whether workers compute on their CPUs, whatever else they see."""
    affinity: Affinity = Affinity.auto
    """``cluster.affinity``."""
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    """Memory of each role on an accelerator, as far as it is known."""
    durability: Durability = Durability.asynchronous
    """``storage.durability``."""
    attempt: int | None = None
    """Number of this start of the run, which the parts of its tables carry; None for a pass that
    has one start only."""
    skip_nonfinite: bool = False
    """Whether a step on numbers that are not finite is left out; otherwise it ends the run."""
    name: str = ""
    """``run.name``, by which Prometheus knows the run."""
    trace: bool = False
    """Whether workers write their spans into the run's table ``trace``."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps, roles and ranks that are profiled."""
    store: StateStore | None = None
    """Store of role states; None for a run without checkpoints."""
    resume_from: ResumeFrom | None = None
    """Checkpoint from which the run resumes; None for a new run."""
    stored_state: Mapping[str, str] = field(default_factory=dict)
    """Folder of the rows that a node had packed for later steps, and unpacks at the start, by
    node."""
    models: Mapping[str, RemoteModel] = field(default_factory=dict)
    """Models at URLs, by URL, as they were when the run began."""
    follows: str | None = None
    """Plugin of the run that lost a worker, of which this one is the next launch: it reuses the
    roles built there."""

    @staticmethod
    def of(
        config: Config,
        members: Mapping[str, str],
        phases: Phases,
        attempt: int | None = None,
        store: StateStore | None = None,
        resume_from: ResumeFrom | None = None,
        follows: str | None = None,
        stored_state: Mapping[str, str] = MappingProxyType({}),
        *,
        models: Mapping[str, RemoteModel] = MappingProxyType({}),
        footprints: Mapping[str, Footprint] = MappingProxyType({}),
    ) -> RunSpec:
        """Return the spec of a new start of the run that ``config`` describes."""
        memory = config.cluster.device_memory
        return RunSpec(
            run=uuid.uuid4().hex[:12],
            # a worker of an existing cluster may run in another folder
            url=absolute(config.run.url),
            seed=config.run.seed,
            members=members,
            phases=serialize_phases(phases),
            builds_from=next(iter(phases)),
            threads=config.cluster.threads,
            data=DataSettings.of(config, members.values()),
            retry_seconds=config.storage.retry_seconds,
            device_memory=None if memory is None else parse_bytes("cluster.device_memory", memory),
            cpu=config.cluster.device is DevicePreference.cpu,
            affinity=config.cluster.affinity,
            footprints=dict(footprints),
            durability=config.storage.durability,
            attempt=attempt,
            skip_nonfinite=config.run.on_nan is OnNan.skip,
            name=config.run.name,
            trace=config.observe.trace and attempt is not None,
            profile=config.profile,
            store=store,
            resume_from=resume_from,
            follows=follows,
            stored_state=dict(stored_state),
            models=dict(models),
        )

    @property
    def plugin(self) -> str:
        """Name of the run's plugins on scheduler and workers."""
        return f"siirl-{self.run}"

    @property
    def topic(self) -> str:
        """Dask event topic on which workers and the supervisor report."""
        return f"siirl-{self.run}"


Phases = Mapping[str, tuple[Plan, Dataset]]


def serialize_phases(phases: Phases) -> bytes:
    """Serialize the inputs of plans, datasets, and specs that options name; modules of the user's
    own are included by value.

    This is one explicit dump, since Dask would pickle them by reference. PlanError when a function,
    option or module cannot be pickled, ConfigError when one that an option names cannot be loaded.
    """
    inputs = {phase: (PlanInputs.of(plan), dataset) for phase, (plan, dataset) in phases.items()}
    specs: dict[str, object] = {}
    for plan, _ in phases.values():
        for role in plan.dag.roles:
            specs.update(specs_of(role.build))
    with own_modules_by_value():
        try:
            return dumps((inputs, specs))
        except Exception as error:
            # an object of the user's may raise anything when it is pickled
            raise PlanError(
                "the nodes and roles cannot be sent to the workers: a function, an option or a "
                f"module of yours that they use cannot be pickled: {type(error).__name__}: {error}"
            ) from error


def deserialize_phases(data: bytes, workers: Sequence[str]) -> Phases:
    """Load what ``serialize_phases`` returned, and compile each plan for ``workers``, the run's in
    rank order.

    RunError when this process lacks a package that nodes or roles use.
    """
    try:
        loaded: tuple[Mapping[str, tuple[PlanInputs, Dataset]], Mapping[str, object]] = (
            cloudpickle.loads(data)
        )
    except Exception as error:  # an imported module may raise anything
        raise RunError(
            f"a worker cannot open the run's nodes and roles: {type(error).__name__}: {clause(error)}; "
            "packages that they use must be installed on the workers, files of yours must be "
            "under the working directory or beside the script"
        ) from error
    inputs, specs = loaded
    receive_specs(specs)  # plans ask them which ranks speak with each other
    return {
        phase: (plan_inputs.compile(workers), dataset)
        for phase, (plan_inputs, dataset) in inputs.items()
    }
