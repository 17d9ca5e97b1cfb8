"""The spec of the backend megatron. Imports megatron-core and MindSpeed only to build a role."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from siirl_dask.config import MEGATRON_OPERATORS, ModelConfig, TrainerConfig
from siirl_dask.devices.operators import MINDSPEED
from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import check_has_safetensors
from siirl_dask.training.layouts import operators_of
from siirl_dask.training.megatron import memory
from siirl_dask.training.megatron.families import check_model, check_ranks
from siirl_dask.training.megatron.mindspeed import check_installed
from siirl_dask.training.specs import (
    TRAINER_KEYS,
    Division,
    RoleRequest,
    TrainerMemory,
    TrainerSpec,
)
from siirl_dask.training.trainer import Critic, Trainer

if TYPE_CHECKING:
    from siirl_dask.training.megatron.replica import Built


def _check(trainer: TrainerConfig, model: ModelConfig, workers: int) -> None:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ConfigError(
            "trainer.backend=megatron needs megatron-core: pip install 'siirl_dask[megatron]'"
        )
    check_ranks(trainer.megatron, workers)
    check_has_safetensors(model.path, trainer.backend)
    check_model(trainer, model.path)
    if MINDSPEED in trainer.operators.values():
        check_installed()


def _division(trainer: TrainerConfig, workers: int) -> Division:
    megatron = trainer.megatron
    key = "trainer.megatron.tensor_parallel"
    groups = {
        key: megatron.tensor_parallel,
        f"{key} x context_parallel": megatron.tensor_parallel * megatron.context_parallel,
        f"{key} x context_parallel x pipeline_parallel": megatron.ranks,
    }
    if megatron.linked_replicas > 1:
        groups["trainer.megatron.expert_parallel"] = megatron.ranks * megatron.linked_replicas
    return Division(
        shards=megatron.shards,
        layer=megatron.tensor_parallel,
        norms=megatron.tensor_parallel if megatron.sequence_parallel else 1,
        row=megatron.context_parallel,
        rows=megatron.shards,
        groups=groups,
    )


def _process(trainer: TrainerConfig) -> str:
    patched = sorted(name for name, library in trainer.operators.items() if library == MINDSPEED)
    if patched:
        return f"megatron-core with MindSpeed's {', '.join(patched)}"
    return "megatron-core as it is"


def _built(request: RoleRequest) -> Built:
    from siirl_dask.training.megatron.core import load

    trainer = request.trainer
    device = request.device
    load(operators_of(trainer, device.kind), device.kind)
    from siirl_dask.training.megatron.replica import Built

    return Built(
        request.model,
        trainer,
        device=device.torch_name,
        rank=request.rank,
        progress=device.progress,
    )


def _policy(request: RoleRequest) -> Trainer:
    built = _built(request)
    from siirl_dask.training.megatron.roles import MegatronPolicy

    waiting = request.device.waiting
    return MegatronPolicy(
        built,
        temperature=request.temperature,
        waiting=waiting,
        routing=request.routing,
    )


def _reference(request: RoleRequest) -> Trainer:
    built = _built(request)
    from siirl_dask.training.megatron.roles import MegatronReference

    return MegatronReference(built, temperature=request.temperature)


def _critic(request: RoleRequest) -> Critic:
    built = _built(request)
    from siirl_dask.training.megatron.roles import MegatronCritic

    return MegatronCritic(built, waiting=request.device.waiting)


SPEC = TrainerSpec(
    name="megatron-core",
    build_policy=_policy,
    build_reference=_reference,
    build_critic=_critic,
    check=_check,
    division=_division,
    reads=TRAINER_KEYS - {"compile", "freeze", "fsdp", "liger", "lora", "park", "visual_lr"},
    replays_routes=True,
    operators=MEGATRON_OPERATORS,
    process=_process,
    memory=TrainerMemory(
        parameters=memory.parameters,
        held=memory.held,
        moments=memory.moments,
        stepped_elsewhere=memory.stepped_elsewhere,
    ),
)
