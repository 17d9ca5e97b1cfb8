"""The specs of the backends torch, whose workers have the whole model each, and fsdp, whose workers
share it.

Imports transformers only to build a role.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from siirl_dask.config import Backend, ModelConfig, TrainerConfig, parse_bytes
from siirl_dask.context import DeviceKind
from siirl_dask.devices.operators import OPERATORS
from siirl_dask.models.shapes import ModelSize, check_has_safetensors
from siirl_dask.training.layouts import check_heads, check_workers
from siirl_dask.training.memory import FLOAT32, held_in_float32, replica_moments, shard_moments
from siirl_dask.training.specs import (
    TRAINER_KEYS,
    Division,
    RoleRequest,
    TrainerMemory,
    TrainerSpec,
)
from siirl_dask.training.trainer import Critic, Trainer

if TYPE_CHECKING:
    from siirl_dask.training.model.heads import PolicyNetwork
    from siirl_dask.training.parallel.backend import ModelBackend

Lay = Callable[[RoleRequest], "ModelBackend"]
"""Function that returns how a role's model lies on its workers."""
_ENDS = 2 * FLOAT32  # bytes per element of the largest parameter: embeddings and head


def _replicated(request: RoleRequest) -> ModelBackend:
    from siirl_dask.training.parallel.backend import ReplicatedBackend

    device = request.device
    return ReplicatedBackend(
        request.model,
        request.trainer,
        device=device.torch_name,
        images=request.images,
        progress=device.progress,
    )


def _sharded(request: RoleRequest) -> ModelBackend:
    from siirl_dask.training.parallel.fsdp import FsdpBackend

    device = request.device
    return FsdpBackend(
        request.model,
        request.trainer,
        device=device.torch_name,
        rank=request.rank,
        images=request.images,
        progress=device.progress,
    )


def _policy(lay: Lay, request: RoleRequest) -> Trainer:
    backend = lay(request)
    from siirl_dask.training.model.heads import PolicyNetwork
    from siirl_dask.training.model.shared_base import AgentNetwork
    from siirl_dask.training.policy import Policy

    trainer = request.trainer

    def make() -> PolicyNetwork:
        network = partial(
            PolicyNetwork,
            temperature=request.temperature,
            float32_head=request.model.float32_head,
            trainer=trainer,
            agents=request.base,
        )
        return backend.network(network).requires_grad_(False)

    own = None
    if request.base:
        shared = request.device.shared(("policy", *request.base), make)
        own = AgentNetwork(shared, request.agent, request.temperature, trainer)
    return Policy(
        backend,
        request.model,
        trainer,
        request.rank,
        temperature=request.temperature,
        park=_parks(request),
        waiting=request.device.waiting,
        cores=_step_cores(request),
        network=own,
        routing=request.routing,
    )


def _reference(lay: Lay, request: RoleRequest) -> Trainer:
    backend = lay(request)
    from siirl_dask.training.policy import Reference

    return Reference(backend, request.model, temperature=request.temperature, park=_parks(request))


def _critic(lay: Lay, request: RoleRequest) -> Critic:
    backend = lay(request)
    from siirl_dask.training.critic import ValueCritic

    return ValueCritic(
        backend,
        request.trainer,
        request.rank,
        park=_parks(request),
        waiting=request.device.waiting,
        cores=_step_cores(request),
    )


def _parks(request: RoleRequest) -> bool:
    """Return whether the model can wait in the host's memory: on a CPU it is always there."""
    if request.device.kind is DeviceKind.CPU:
        return False
    return request.trainer.park


def _step_cores(request: RoleRequest) -> int:
    """Return the cores for an optimizer in the host's memory, whose device waits for it; 0:
    torch's own threads.
    """
    device = request.device
    if request.trainer.fsdp.offload and device.kind is not DeviceKind.CPU:
        return device.cores
    return 0


def _check_fsdp(trainer: TrainerConfig, model: ModelConfig, workers: int) -> None:
    check_workers(trainer, workers)
    check_has_safetensors(model.path, trainer.backend)
    check_heads(trainer, model.path)


def _divided_by_fsdp(trainer: TrainerConfig, workers: int) -> Division:
    fsdp = trainer.fsdp
    shards = workers if fsdp.shard_size is None else fsdp.shard_size
    groups = {}
    if fsdp.tensor_parallel == 1:
        groups = {"trainer.fsdp.shard_size": shards}
    groups["trainer.fsdp.sequence_parallel"] = fsdp.sequence_parallel
    groups["trainer.fsdp.tensor_parallel"] = fsdp.tensor_parallel
    return Division(
        shards=shards,
        layer=fsdp.tensor_parallel,
        row=fsdp.sequence_parallel,
        rows=fsdp.tensor_parallel,
        prompts_once=fsdp.sequence_parallel == 1,
        groups=groups,
    )


def _parameters(size: ModelSize, trainer: TrainerConfig) -> int:
    """Count the parameters of a replica: each tensor-parallel rank has the embeddings of both
    ends in full.
    """
    return size.total + 2 * (trainer.fsdp.tensor_parallel - 1) * size.largest


def _gathered(size: ModelSize, trainer: TrainerConfig, learns: bool) -> int:
    """Return the bytes that fsdp holds gathered at once: the embeddings of both ends and one group
    of layers, and if the model learns as much for their gradients.
    """
    # layers join a group until it has gather_size, so the last one may exceed it
    unit = parse_bytes("trainer.fsdp.gather_size", trainer.fsdp.gather_size) + FLOAT32 * size.layer
    return (2 if learns else 1) * (_ENDS * size.largest + min(unit, FLOAT32 * size.total))


TORCH = TrainerSpec(
    name="torch",
    build_policy=partial(_policy, _replicated),
    build_reference=partial(_reference, _replicated),
    build_critic=partial(_critic, _replicated),
    reads=TRAINER_KEYS - {"fsdp"},
    sees_images=True,
    replays_routes=True,
    scores_averages=True,
    pads_families=True,
    operators=OPERATORS,
    memory=TrainerMemory(
        parameters=_parameters,
        held=held_in_float32,
        moments=replica_moments,
        replicated=True,
        shards_with=Backend.fsdp,
    ),
)
"""The whole model on every worker of the role."""
FSDP = TrainerSpec(
    name="fsdp",
    build_policy=partial(_policy, _sharded),
    build_reference=partial(_reference, _sharded),
    build_critic=partial(_critic, _sharded),
    check=_check_fsdp,
    division=_divided_by_fsdp,
    reads=TRAINER_KEYS,
    sees_images=True,
    replays_routes=True,
    scores_averages=True,
    pads_families=True,
    gathers=True,
    operators=OPERATORS,
    memory=TrainerMemory(
        parameters=_parameters,
        held=held_in_float32,
        moments=shard_moments,
        gathered=_gathered,
    ),
)
"""Shards of the model over the workers of the role (FSDP2)."""
