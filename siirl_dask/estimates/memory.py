"""Estimates an upper bound of each worker's memory, and refuses a run that exceeds ``cluster.memory_limit``.

    process     Python with torch, transformers, Arrow and Dask
    roles       what each role's builder declares (``RoleCost.memory``): see training/preflight.py, rollout/preflight.py
    computing   the largest of what its roles take besides while they compute, one after the other
    checkpoint  the copy that is written while training goes on (``RoleCost.checkpoint_copy``)
    tables      peak of the live tables, over the nodes of the chain: see planner/explain/memory.py
    moving      rows published and received by the steps that run at once; at most data.memory_limit

Where workers have accelerators, roles are there, and only what they keep in the host's memory counts: see
device_memory.py.

Not counted: transformers' key-value cache, columns without a bound (texts of the dataset), and the prompts that
the dataloader holds ahead (an eighth of data.memory_limit at most).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from siirl_dask.config import Config, Dtype, ModelConfig, WeightSync, parse_bytes
from siirl_dask.coordinator import Dataset, Source, exists, open_source
from siirl_dask.errors import PlanError
from siirl_dask.models.remote import UnreachableModelError
from siirl_dask.models.routing import read_routing
from siirl_dask.models.shapes import ModelSize, count_parameters
from siirl_dask.planner import (
    Node,
    Phase,
    Plan,
    RoleCost,
    TableSizes,
    TableUsage,
    always_reloaded,
    options_of,
    usage,
)
from siirl_dask.schema import PARAMETER_DATA, ROUTED_EXPERTS
from siirl_dask.training.preflight import count_adapters
from siirl_dask.wording import readable_bytes, worker_ranges
from siirl_dask.worker.run_spec import Phases

_PROCESS = 450 * 10**6  # 414 MB were measured on Linux, before a model
_LIBRARIES = 2 * 10**9  # of an accelerator, which a process loads; by habit, not measured
# bytes of a published parameter's name, type, shape and ids, for names up to about 400 letters
_ROW = 512
_ROW_END = 8  # bytes that Arrow spends on where a list ends
_ADVICE = {  # advice by the largest part
    "tables": "lower data.batch_size, rollout.n, rollout.max_response_length or data.max_prompt_length, or give the "
    "roles more workers",
    "moving rows": "lower data.memory_limit or run.lookahead, or what makes the tables large",
    "roles": "take a smaller model, or give the roles workers of their own",
    "checkpoint": "set checkpoint.asynchronous=false, or give the roles workers of their own",
    "computing": "lower trainer.max_tokens_per_micro_batch, or set trainer.gradient_checkpointing=true",
}


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Estimated bytes of each worker in a group of workers that have the same roles."""

    workers: tuple[str, ...]
    roles: Mapping[str, int | None]
    """Bytes of each role's object; None if unknown."""
    tables: int
    """Peak bytes of live tables."""
    largest: str
    """Node and phase of that peak, as ``update of train``."""
    moving: int
    """Bytes of rows published and received."""
    unknown: tuple[str, ...]
    """Columns whose size has no bound."""
    process: int = _PROCESS
    """Bytes of the process before any role is built."""
    checkpoint: int = 0
    """Bytes of the copy from which an asynchronous checkpoint is written."""
    computing: int = 0
    """Most bytes that one of its roles takes besides while it computes."""
    loading: int = 0
    """Bytes that are there while the roles are built, instead of rows and what is computed."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        roles = sum(size or 0 for size in self.roles.values())
        return {
            "process": self.process,
            "roles": roles,
            "computing": self.computing,
            "checkpoint": self.checkpoint,
            "tables": self.tables,
            "moving rows": self.moving,
        }

    @property
    def total(self) -> int:
        """Bytes in all."""
        return max(sum(self.parts.values()), self.process + self.parts["roles"] + self.loading)

    def text(self) -> str:
        """Return the parts with their sizes as one line, largest first."""
        parts = {
            f"tables (at {self.largest})": self.tables,
            "moving rows": self.moving,
            "process": self.process,
        }
        if self.checkpoint:
            parts["checkpoint"] = self.checkpoint
        if self.computing:
            parts["activations"] = self.computing
        if self.loading:
            parts["loading, at the start"] = self.loading
        for role, size in self.roles.items():
            if size:
                parts[f"role {role}"] = size
        largest_first = sorted(parts.items(), key=lambda pair: -pair[1])
        texts = [f"{name} {readable_bytes(size)}" for name, size in largest_first]
        if self.unknown:
            texts.append(f"columns {', '.join(self.unknown)} ?")
        return ", ".join(texts)


def memory_of(
    config: Config,
    phases: Phases,
    costs: Mapping[str, RoleCost],
    *,
    accelerators: bool = False,
) -> list[WorkerMemory]:
    """Return the host's memory of each group of workers with the same roles, in the phase that
    takes most.

    With ``accelerators`` the roles compute there, and else on the CPU.
    """
    count = cache(count_parameters)
    usage_of_workers = {
        phase: usage(plan, sizes_of(config, plan, dataset, count))
        for phase, (plan, dataset) in phases.items()
        if phase is not Phase.TEST  # the validation's plan on other data
    }
    first_plan, _ = next(iter(phases.values()))
    groups = []
    for names, workers in _by_roles(first_plan).items():
        usages: list[tuple[str, TableUsage]] = []
        for phase, by_worker in usage_of_workers.items():
            usages += [(phase, by_worker[worker]) for worker in workers]
        own = {name: costs[name] for name in names}
        memory = _peak(config, workers, {name: cost.memory for name, cost in own.items()}, usages)
        memory = replace(memory, checkpoint=sum(cost.checkpoint_copy for cost in own.values()))
        if accelerators:
            spared = spared_roles([plan for plan, _ in phases.values()], own, workers)
            groups.append(_beside_accelerators(memory, own, spared))
        else:
            computing = max((cost.computing for cost in own.values()), default=0)
            groups.append(replace(memory, computing=computing))
    return groups


def spared_roles(
    plans: Sequence[Plan], costs: Mapping[str, RoleCost], workers: Sequence[str]
) -> frozenset[str]:
    """Return the roles whose weights the host need not store while they sleep.

    They get new weights on these workers each time after another role has computed on the device.
    """
    frees = frozenset(
        name for name, cost in costs.items() if cost.device is not None and cost.device.busy
    )
    chains = [plan.chains[worker] for plan in plans for worker in workers]
    return frozenset(
        role for role in costs if all(always_reloaded(chain, role, frees) for chain in chains)
    )


def _beside_accelerators(
    memory: WorkerMemory, costs: Mapping[str, RoleCost], spared: frozenset[str]
) -> WorkerMemory:
    """Return the host's memory of workers whose roles compute on accelerators."""
    roles: dict[str, int | None] = {}
    loading = 0
    sleeping = 0
    for name, cost in costs.items():
        footprint = cost.device
        if footprint is None:
            roles[name] = None
            continue
        loading = max(loading, footprint.loading)
        host = sum(footprint.host.values())
        asleep = sum(footprint.spared.values())
        if name in spared:
            roles[name] = host
            sleeping += asleep
        else:
            roles[name] = host + asleep
    return replace(memory, roles=roles, loading=loading + sleeping, process=_PROCESS + _LIBRARIES)


def _by_roles(plan: Plan) -> dict[tuple[str, ...], list[str]]:
    roles_of: dict[str, list[str]] = {worker: [] for worker in plan.chains}
    for role, placed in plan.placement.items():
        for worker in placed:
            roles_of[worker].append(role)
    groups: dict[tuple[str, ...], list[str]] = {}
    for worker, roles in roles_of.items():
        groups.setdefault(tuple(roles), []).append(worker)
    return groups


def _peak(
    config: Config,
    workers: Sequence[str],
    roles: Mapping[str, int | None],
    usages: Sequence[tuple[str, TableUsage]],
) -> WorkerMemory:
    """Return the memory of workers in the phase whose tables take most."""
    phase, peak = max(usages, key=lambda pair: pair[1].tables)
    steps = config.run.lookahead + (config.rollout.steps_ahead or 0) + 1
    moving = steps * max(used.moving for _, used in usages)
    unknown = [name for _, used in usages for name in used.unknown]
    return WorkerMemory(
        workers=tuple(workers),
        roles=roles,
        tables=peak.tables,
        largest=f"{peak.node} of {phase}",
        moving=min(parse_bytes("data.memory_limit", config.data.memory_limit), moving),
        unknown=tuple(dict.fromkeys(unknown)),
    )


def check_memory(config: Config, groups: Sequence[WorkerMemory]) -> None:
    """Raise PlanError if a worker may need more than ``cluster.memory_limit``."""
    if config.cluster.memory_limit is None:
        return
    limit = parse_bytes("cluster.memory_limit", config.cluster.memory_limit)
    for memory in groups:
        if memory.total <= limit:
            continue
        parts = memory.parts
        advice = "a process takes that much"
        if memory.process < limit:
            largest = max(_ADVICE, key=lambda name: parts[name])
            advice = _ADVICE[largest]
        raise PlanError(
            f"workers {worker_ranges(memory.workers, memory.workers)} "
            f"({', '.join(memory.roles) or 'no role'}) "
            f"may each come to need {readable_bytes(memory.total)}, and cluster.memory_limit="
            f"{config.cluster.memory_limit!r}: {memory.text()}; {advice}, or raise "
            "cluster.memory_limit"
        )


def sizes_of(
    config: Config,
    plan: Plan,
    dataset: Dataset,
    count: Callable[[str], ModelSize | None] = count_parameters,
) -> TableSizes:
    """Return the sizes that a phase's estimates start from. An absent dataset that is read whole
    counts as a batch.
    """
    totals: dict[str, int] = {}
    pieces: dict[str, tuple[int, int]] = {}
    for node in plan.dag.nodes:
        published = _published(node, config, plan, count)
        if published is not None:
            size, itemsize = published
            totals[node.name] = size.total * itemsize + size.tensors * _ROW
            pieces[node.name] = (size.tensors, size.largest * itemsize + _ROW)
    prompts = dataset.batch_size
    if not prompts:
        prompts = _rows(dataset.sources[0])
    if not prompts:
        prompts = config.data.batch_size
    return TableSizes(
        prompts=prompts,
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.rollout.max_response_length,
        widths=_route_widths(config),
        totals=totals,
        pieces=pieces,
        part=parse_bytes("rollout.weight_bucket", config.rollout.weight_bucket),
        buffers=config.rollout.weight_sync is WeightSync.broadcast,
        minibatches=config.algorithm.minibatches,
        quadratic_from=config.data.quadratic_from,
    )


def _route_widths(config: Config) -> dict[str, int]:
    """Return the bytes of a row's routes, a byte for each expert that a token goes to; none
    where they are unknown.
    """
    routing = None
    if config.rollout.router_replay:
        routing = read_routing(config.model.path)
    if routing is None:
        return {}
    tokens = config.data.max_prompt_length + config.rollout.max_response_length - 1
    return {ROUTED_EXPERTS: _ROW_END + tokens * routing.width}


def _rows(source: Source) -> int:
    """Return the rows of a table, 0 for an absent one."""
    if source.table or exists(source.url):
        return open_source(source).num_rows
    return 0


def _published(
    node: Node,
    config: Config,
    plan: Plan,
    count: Callable[[str], ModelSize | None],
) -> tuple[ModelSize, int] | None:
    """Return the size of the weights that a node publishes, and the bytes of each number.

    None for a node that publishes none, and for a model that is not on this machine or whose store
    cannot be reached, which ``check`` has said.
    """
    if PARAMETER_DATA not in node.contract.writes.names:
        return None
    options = options_of(plan.dag.role(node.role).build)
    model: ModelConfig = options.get("model", config.model)
    lora = node.options.get("lora")
    itemsize = model.dtype.itemsize
    try:
        if lora is not None and lora.rank:
            size = count_adapters(model.path, options.get("trainer", config.trainer))
            itemsize = Dtype.float32.itemsize
        else:
            size = count(model.path)
    except UnreachableModelError:
        return None
    if size is None:
        return None
    return (size, itemsize)
