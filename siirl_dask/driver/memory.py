"""What a worker process needs of memory, at most, and PlanError for a run that does not have it.

    process     Python with torch, transformers, Arrow and Dask
    roles       a model that learns: weights, gradients and AdamW's two moments in float32, 16 bytes a parameter, 20
                with an average of the weights; the reference: 4; with trainer.lora_rank 4 a parameter, and what
                learns is the adapters; with trainer.backend=fsdp a worker's shard of that, and whole, with gradients,
                the embeddings of both ends and trainer.gather_size of layers; an engine or a reward model: 4, or 2 in
                bfloat16, of an engine with rollout.tensor_parallel_size a slice of that, and rollout.kv_cache_memory,
                or for vLLM the 1 GiB that it takes on a CPU
    checkpoint  where it is written while training goes on: a copy of what learns and its moments, 12 bytes a parameter,
                16 with an average; of adapters with trainer.lora_rank, of a worker's shard with trainer.backend=fsdp
    tables      at that node of the chain where there are most: see planner/memory.py
    moving      published and received, of as many steps as run at once; no more than data.memory_limit

Not in it: activations, what transformers keeps of keys and values, columns that nothing bounds (texts of the dataset),
and what the dataloader keeps of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from siirl_dask.adapters import PUBLISHES, count_adapters
from siirl_dask.config import Backend, Config, Dtype, Engine, RolloutConfig, TrainerConfig, WeightsBy, parse_bytes
from siirl_dask.coordinator.dataloader import Source, open_source
from siirl_dask.errors import PlanError
from siirl_dask.parameters import Parameters, count_parameters
from siirl_dask.phases import Phases, exists
from siirl_dask.planner import Node, Plan, Role, Sizes, Usage, usage
from siirl_dask.planner.canonical import function_name
from siirl_dask.planner.contract import bare
from siirl_dask.planner.text import readable_bytes, who
from siirl_dask.roles import ENGINE, REFERENCE, builder_of, model_of, placed_by, rollout_of, trainer_of
from siirl_dask.rollout import choose_engine
from siirl_dask.rollout.engine import CPU_CACHE
from siirl_dask.schema import PARAMETER_DATA

_PROCESS = 450 * 10**6  # 414 MB were measured on Linux, before a model
_LEARNS, _SCORES, _AVERAGE = 16, 4, 4  # bytes a parameter
_GRADIENT = 4  # of _LEARNS: no checkpoint has it
_GATHERED = 4 * 4  # of the largest parameter: as embeddings and as head, and the gradients of both
_PER_PARAMETER = {
    "siirl_dask.training:build_trainer": _LEARNS,
    "siirl_dask.training:build_critic": _LEARNS,
    REFERENCE: _SCORES,
}
_SCORER = "siirl_dask.rewards.scorer:build_scorer"
_IN_DTYPE = (ENGINE, "siirl_dask.training:build_reward_model")
_ROW = 512  # bytes of a published parameter's name, type, shape and ids: names of 400 letters would be long
_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_LOWER = {  # what to do about the largest part
    "tables": "lower data.batch_size, rollout.n, rollout.max_response_length or data.max_prompt_length, or give the "
    "roles more workers",
    "moving rows": "lower data.memory_limit or run.lookahead, or what makes the tables large",
    "roles": "take a smaller model, or give the roles workers of their own",
    "checkpoint": "set checkpoint.asynchronous=false, or give the roles workers of their own",
}


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Of each of some workers that have the same roles, in bytes."""

    workers: tuple[str, ...]
    roles: Mapping[str, int | None]
    """What each role builds; None where that is not known."""
    tables: int
    largest: str
    """Where the most tables are there at once: ``update of train``."""
    moving: int
    unknown: tuple[str, ...]
    """Columns that nothing bounds."""
    process: int = _PROCESS
    checkpoint: int = 0
    """The copy of what its roles have learned that is being written."""

    @property
    def parts(self) -> dict[str, int]:
        roles = sum(size or 0 for size in self.roles.values())
        return {
            "process": self.process,
            "roles": roles,
            "checkpoint": self.checkpoint,
            "tables": self.tables,
            "moving rows": self.moving,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def text(self) -> str:
        """Each part, largest first."""
        parts = {f"tables (at {self.largest})": self.tables, "moving rows": self.moving, "process": self.process}
        parts |= {"checkpoint": self.checkpoint} if self.checkpoint else {}
        parts |= {f"role {role}": size for role, size in self.roles.items() if size}
        known = (f"{name} {readable_bytes(size)}" for name, size in sorted(parts.items(), key=lambda pair: -pair[1]))
        unknown = [f"role {role} ?" for role, size in self.roles.items() if size is None]
        return ", ".join([*known, *unknown, *([f"columns {', '.join(self.unknown)} ?"] if self.unknown else [])])


def memory_of(config: Config, phases: Phases) -> list[WorkerMemory]:
    """Workers by what roles they have, each with the largest of its phases and of its like."""
    count = cache(count_parameters)
    used = {
        phase: usage(plan, sizes_of(config, plan, source, count))
        for phase, (plan, source) in phases.items()
        if phase != "test"  # the validation's plan on other data
    }
    plan = phases["train"][0]
    roles = [(role, len(plan.placement[role.name])) for role in plan.dag.roles]
    built = {role.name: _built(role, workers, config, count) for role, workers in roles}
    copied = {role.name: _copied(role, workers, config, count) for role, workers in roles}
    found = []
    for names, workers in _by_roles(plan).items():
        each = [(phase, one[worker]) for phase, one in used.items() for worker in workers]
        most = _largest(config, workers, {name: built[name] for name in names}, each)
        found.append(replace(most, checkpoint=sum(copied[name] for name in names)))
    return found


def _by_roles(plan: Plan) -> dict[tuple[str, ...], list[str]]:
    roles_of: dict[str, list[str]] = {worker: [] for worker in plan.chains}
    for role, placed in plan.placement.items():
        for worker in placed:
            roles_of[worker].append(role)
    groups: dict[tuple[str, ...], list[str]] = {}
    for worker, roles in roles_of.items():
        groups.setdefault(tuple(roles), []).append(worker)
    return groups


def _largest(
    config: Config, workers: Sequence[str], roles: Mapping[str, int | None], each: Sequence[tuple[str, Usage]]
) -> WorkerMemory:
    phase, most = max(each, key=lambda pair: pair[1].tables)
    steps = config.run.lookahead + (config.rollout.ahead or 0) + 1
    return WorkerMemory(
        workers=tuple(workers),
        roles=roles,
        tables=most.tables,
        largest=f"{most.node} of {phase}",
        moving=min(parse_bytes("data.memory_limit", config.data.memory_limit), steps * max(u.moving for _, u in each)),
        unknown=tuple(dict.fromkeys(name for _, used in each for name in used.unknown)),
    )


def refuse_what_cannot_fit(config: Config, phases: Phases) -> None:
    """PlanError when ``cluster.memory_limit`` is less than what a worker may come to need."""
    if config.cluster.memory_limit is None:
        return
    limit = parse_bytes("cluster.memory_limit", config.cluster.memory_limit)
    for memory in memory_of(config, phases):
        if memory.total > limit:
            parts = memory.parts
            largest = max(list(_LOWER), key=lambda name: parts[name]) if memory.process < limit else "process"
            raise PlanError(
                f"workers {who(memory.workers, memory.workers)} ({', '.join(memory.roles) or 'no role'}) may each come "
                f"to need {readable_bytes(memory.total)}, and cluster.memory_limit={config.cluster.memory_limit!r}: "
                f"{memory.text()}; {_LOWER.get(largest, 'a process takes that much')}, or raise cluster.memory_limit"
            )


def sizes_of(
    config: Config, plan: Plan, source: Source, count: Callable[[str], Parameters | None] = count_parameters
) -> Sizes:
    """What the estimates of a phase start from. A dataset that is read whole and is not there yet counts as a batch."""
    published = {node.name: _published(node, config, plan, count) for node in plan.dag.nodes}
    weights = {name: found for name, found in published.items() if found is not None}
    rows = source.batch_size or (open_source(source).num_rows if exists(source.url) else config.data.batch_size)
    return Sizes(
        prompts=rows,
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.rollout.max_response_length,
        totals={name: found.total * each + found.tensors * _ROW for name, (found, each) in weights.items()},
        pieces={name: (found.tensors, found.largest * each + _ROW) for name, (found, each) in weights.items()},
        part=parse_bytes("rollout.weights_bucket", config.rollout.weights_bucket),
        buffers=config.rollout.weights_by is WeightsBy.broadcast,
        minibatches=config.algorithm.minibatches,
        quadratic_from=config.data.quadratic_from,
    )


def _published(
    node: Node, config: Config, plan: Plan, count: Callable[[str], Parameters | None]
) -> tuple[Parameters, int] | None:
    """What a node publishes of the model, and bytes of each number; None for other nodes, and of a model that is not
    there.
    """
    if PARAMETER_DATA not in node.contract.writes.names:
        return None
    role = next(role for role in plan.dag.roles if role.name == node.role)
    if function_name(bare(node.fn)) == PUBLISHES and (learns := trainer_of(role, config)) is not None:
        found, each = count_adapters(config.model.path, learns), _BYTES[Dtype.float32]
    else:
        found, each = count(config.model.path), _BYTES[config.model.dtype]
    return None if found is None else (found, each)


def _built(role: Role, workers: int, config: Config, count: Callable[[str], Parameters | None]) -> int | None:
    """Bytes of what the role builds on each of its workers; None where that is not known."""
    name, model = builder_of(role), model_of(role, config)
    if name == _SCORER:
        return 0
    each = _BYTES[model.dtype] if name in _IN_DTYPE else _PER_PARAMETER.get(name)
    parameters = count(model.path) if each is not None else None
    if each is None or parameters is None:
        return None
    if name in _PER_PARAMETER:
        return _trained(role, each, parameters, config, workers)
    if (rollout := rollout_of(role, config)) is None:
        return each * parameters.total
    return -(-each * parameters.total // rollout.tensor_parallel_size) + _cache(rollout)


def _cache(rollout: RolloutConfig) -> int:
    """Bytes of an engine's keys and values. On an accelerator vLLM takes of its memory what is left."""
    uses_vllm = rollout.engine is Engine.vllm or choose_engine(rollout.engine) is Engine.vllm
    size = rollout.kv_cache_memory or (CPU_CACHE if uses_vllm else None)
    return parse_bytes("rollout.kv_cache_memory", size) if size else 0


def _trained(role: Role, each: int, parameters: Parameters, config: Config, workers: int) -> int:
    """``each`` bytes a parameter, or a parameter of the adapters, of all of them or of a shard."""
    trainer = placed_by(role, config)
    assert trainer is not None  # its builder is one of ours
    adapters = _adapters(role, config)
    each += _AVERAGE if trainer.ema_decay and each == _LEARNS else 0
    held = _numbers(parameters, trainer)
    size = each * held if adapters is None else _SCORES * held + each * adapters.total
    return _share(size, trainer, workers) + (_gathered(parameters, trainer) if trainer.backend is Backend.fsdp else 0)


def _gathered(parameters: Parameters, trainer: TrainerConfig) -> int:
    """Of what is whole for a moment: the embeddings of both ends, and layers that are gathered together, with their
    gradients.
    """
    most = parse_bytes("trainer.gather_size", trainer.gather_size) + 4 * parameters.layer  # the last one goes beyond it
    layers = min(most, 4 * parameters.total)
    return _GATHERED * parameters.largest + 2 * layers


def _copied(role: Role, workers: int, config: Config, count: Callable[[str], Parameters | None]) -> int:
    """Bytes of the copy of what the role has learned, on each of its workers, while a checkpoint is written."""
    trainer = trainer_of(role, config)
    if trainer is None or not (config.checkpoint.every and config.checkpoint.asynchronous):
        return 0
    learned = _adapters(role, config) or count(model_of(role, config).path)
    each = _LEARNS - _GRADIENT + (_AVERAGE if trainer.ema_decay else 0)
    return 0 if learned is None else _share(each * _numbers(learned, trainer), trainer, workers)


def _adapters(role: Role, config: Config) -> Parameters | None:
    """What learns in place of the model; None where the model does, or nothing."""
    trainer = trainer_of(role, config)
    if trainer is None or not trainer.lora_rank:
        return None
    return count_adapters(model_of(role, config).path, trainer)


def _numbers(parameters: Parameters, trainer: TrainerConfig) -> int:
    """On all workers together: each of those that share layers has the embeddings of both ends, the largest of all."""
    return parameters.total + 2 * (trainer.tensor_parallel - 1) * parameters.largest


def _share(size: int, trainer: TrainerConfig, workers: int) -> int:
    """Of one of the workers that a model is in shards over."""
    return size if trainer.backend is Backend.torch else -(-size // (trainer.shard_size or workers))
