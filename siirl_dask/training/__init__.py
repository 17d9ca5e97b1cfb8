"""Policies, references, critics, reward models and encoders of texts. Each ``build_...`` function is a role's
``build``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from siirl_dask.config import Backend, ImagesConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.cache import local_model
from siirl_dask.models.routing import needed_routing
from siirl_dask.planner import builds
from siirl_dask.training.layouts import check_replay, operators_of
from siirl_dask.training.preflight import (
    check_critic,
    check_encoder,
    check_reference,
    check_reward_model,
    check_trainer,
    trainer_groups,
)
from siirl_dask.training.trainer import (
    Batch,
    Critic,
    EpisodeSpans,
    NonFinite,
    ObservedImage,
    OnNonFinite,
    PackedRows,
    RewardModel,
    RowImages,
    TextEncoder,
    TokenScores,
    TrainBatch,
    Trainer,
    ValueBatch,
)

if TYPE_CHECKING:
    from siirl_dask.training.megatron.replica import Built
    from siirl_dask.training.parallel.backend import ModelBackend

__all__ = [
    "Batch",
    "Critic",
    "EpisodeSpans",
    "NonFinite",
    "ObservedImage",
    "OnNonFinite",
    "PackedRows",
    "RewardModel",
    "RowImages",
    "TextEncoder",
    "TokenScores",
    "TrainBatch",
    "Trainer",
    "ValueBatch",
    "build_critic",
    "build_encoder",
    "build_reference",
    "build_reward_model",
    "build_trainer",
    "check_critic",
    "check_reference",
    "check_reward_model",
    "check_trainer",
]


@builds(preflight=check_trainer, groups=trainer_groups)
def build_trainer(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    images: ImagesConfig | None = None,
    agent: str = "",
    base: Sequence[str] = (),
) -> Trainer:
    """Build a policy that learns, one of ``rank.size`` that learn together. ConfigError if ``model.path`` is unusable.

    Log-probs are taken at the rollout's temperature, so they describe the distribution that was sampled. The policy
    sees images where ``images`` has a column of them. ``base`` names agents whose adapters lie over one base, which
    this worker holds once for all their roles; ``agent`` is this one's. With ``rollout.router_replay`` it goes by the
    engine's routes.
    """
    check_replay(trainer, rollout)
    routing = needed_routing(local_model(model, device).path) if rollout.router_replay else None
    if trainer.backend == Backend.megatron:
        built = _megatron(device, rank, model, trainer)
        from siirl_dask.training.megatron.roles import MegatronPolicy

        with device.stage("the loading of weights"):
            return MegatronPolicy(built, temperature=rollout.temperature, waiting=device.waiting, routing=routing)
    backend = _backend(device, rank, model, trainer, images)
    from siirl_dask.training.model.network import PolicyNetwork
    from siirl_dask.training.model.shared_base import AgentNetwork
    from siirl_dask.training.policy import Policy  # imports transformers

    def make() -> PolicyNetwork:
        network = partial(
            PolicyNetwork,
            temperature=rollout.temperature,
            float32_head=model.float32_head,
            trainer=trainer,
            agents=base,
        )
        return backend.network(network).requires_grad_(False)

    with device.stage("the loading of weights"):
        own = (
            AgentNetwork(device.shared(("policy", *base), make), agent, rollout.temperature, trainer) if base else None
        )
        return Policy(
            backend,
            model,
            trainer,
            rank,
            temperature=rollout.temperature,
            park=_parks(trainer, device),
            waiting=device.waiting,
            cores=_step_cores(trainer, device),
            network=own,
            routing=routing,
        )


@builds(preflight=check_reference, groups=trainer_groups)
def build_reference(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    images: ImagesConfig | None = None,
) -> Trainer:
    """Build the policy as it was at the start. A reference scores and never learns: no gradients, no optimizer."""
    if trainer.backend == Backend.megatron:
        built = _megatron(device, rank, model, trainer)
        from siirl_dask.training.megatron.roles import MegatronReference

        with device.stage("the loading of weights"):
            return MegatronReference(built, temperature=rollout.temperature)
    backend = _backend(device, rank, model, trainer, images)
    from siirl_dask.training.policy import Reference

    with device.stage("the loading of weights"):
        return Reference(backend, model, temperature=rollout.temperature, park=_parks(trainer, device))


@builds(preflight=check_critic, groups=trainer_groups)
def build_critic(
    device: Device, rank: Rank, *, model: ModelConfig, trainer: TrainerConfig, images: ImagesConfig | None = None
) -> Critic:
    """Build a critic that begins as the model in ``model.path``, one of ``rank.size`` that learn together."""
    if trainer.backend == Backend.megatron:
        built = _megatron(device, rank, model, trainer)
        from siirl_dask.training.megatron.roles import MegatronCritic

        with device.stage("the loading of weights"):
            return MegatronCritic(built, waiting=device.waiting)
    backend = _backend(device, rank, model, trainer, images)
    from siirl_dask.training.critic import ValueCritic

    with device.stage("the loading of weights"):
        return ValueCritic(
            backend,
            trainer,
            rank,
            park=_parks(trainer, device),
            waiting=device.waiting,
            cores=_step_cores(trainer, device),
        )


def _parks(trainer: TrainerConfig, device: Device) -> bool:
    """Return whether the model can wait in the host's memory: on a CPU it is always there."""
    return trainer.park and device.kind is not DeviceKind.CPU


def _step_cores(trainer: TrainerConfig, device: Device) -> int:
    """Return the cores for an optimizer in the host's memory, whose device waits for it; 0: torch's own threads."""
    offloads = trainer.backend is Backend.fsdp and trainer.fsdp.offload
    return device.cores if offloads and device.kind is not DeviceKind.CPU else 0


def _megatron(device: Device, rank: Rank, model: ModelConfig, trainer: TrainerConfig) -> Built:
    hide()
    from siirl_dask.training.megatron.core import load

    load(operators_of(trainer, device.kind), device.kind)
    from siirl_dask.training.megatron.replica import Built

    model = local_model(model, device)
    return Built(model, trainer, device=device.torch_name, rank=rank, progress=device.progress)


def _backend(
    device: Device, rank: Rank, model: ModelConfig, trainer: TrainerConfig, images: ImagesConfig | None
) -> ModelBackend:
    hide()
    model = local_model(model, device)
    name = device.torch_name
    progress = device.progress
    if trainer.backend == Backend.fsdp:
        from siirl_dask.training.parallel.fsdp import FsdpBackend

        return FsdpBackend(model, trainer, device=name, rank=rank, images=images, progress=progress)
    from siirl_dask.training.parallel.backend import ReplicatedBackend

    return ReplicatedBackend(model, trainer, device=name, images=images, progress=progress)


@builds(preflight=check_reward_model)
def build_reward_model(
    device: Device, rank: Rank, *, model: ModelConfig, max_tokens_per_batch: int = 16384
) -> RewardModel:
    """Build the sequence classifier in ``model.path``. A batch holds ``max_tokens_per_batch`` tokens, padding included.

    The model reads the policy's token ids, so both need the same tokenizer. ConfigError if the folder is unusable.
    """
    hide()
    from siirl_dask.training.reward_model import TorchRewardModel

    model = local_model(model, device)
    with device.stage("the loading of weights"):
        return TorchRewardModel(model, device=device.torch_name, budget=max_tokens_per_batch, progress=device.progress)


@builds(preflight=check_encoder)
def build_encoder(device: Device, rank: Rank, *, model: ModelConfig, max_tokens: int = 512) -> TextEncoder:
    """Build the model in ``model.path`` that encodes texts, of which it reads the first ``max_tokens`` tokens.

    It brings its own tokenizer and has nothing to do with the policy's model. ConfigError if the folder is unusable.
    """
    hide()
    from siirl_dask.training.encoder import TorchTextEncoder

    model = local_model(model, device)
    with device.stage("the loading of weights"):
        return TorchTextEncoder(model, device=device.torch_name, max_tokens=max_tokens, progress=device.progress)
