"""Policies, references, critics, reward models and encoders of texts. Each ``build_...`` function
is a role's ``build``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from siirl_dask.config import ImagesConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.architecture import ModelUse
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.cache import local_model
from siirl_dask.models.planned_models import model_here
from siirl_dask.models.routing import needed_routing
from siirl_dask.planner import builds
from siirl_dask.training.layouts import check_replay
from siirl_dask.training.preflight import (
    ENCODED_TOKENS,
    check_critic,
    check_encoder,
    check_reference,
    check_reward_model,
    check_trainer,
    trainer_groups,
)
from siirl_dask.training.specs import (
    TRAINERS,
    Division,
    RoleRequest,
    TrainerMemory,
    TrainerSpec,
    needed,
    own_specs,
    trainer_spec,
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

T = TypeVar("T")
__all__ = [
    "Batch",
    "Critic",
    "Division",
    "EpisodeSpans",
    "NonFinite",
    "ObservedImage",
    "OnNonFinite",
    "PackedRows",
    "RewardModel",
    "RoleRequest",
    "RowImages",
    "TextEncoder",
    "TokenScores",
    "TrainBatch",
    "Trainer",
    "TrainerMemory",
    "TrainerSpec",
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
    "files",
    "model",
    "parts",
    "preflight",
    "specs",
    "trainer_spec",
]


@builds(preflight=check_trainer, groups=trainer_groups, specs=own_specs)
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
    """Build a policy that learns, one of ``rank.size`` that learn together. ConfigError if
    ``model.path`` is unusable.

    Log-probs are taken at the rollout's temperature, so they describe the distribution that was
    sampled. The policy sees images where ``images`` has a column of them. ``base`` names agents
    whose adapters lie over one base, which this worker holds once for all their roles; ``agent`` is
    this one's. With ``rollout.router_replay`` it goes by the engine's routes.
    """
    check_replay(trainer, rollout)
    model = _model_here(model, device, trainer)
    request = RoleRequest(
        device=device,
        rank=rank,
        model=model,
        trainer=trainer,
        temperature=rollout.temperature,
        images=images,
        routing=needed_routing(model.path) if rollout.router_replay else None,
        agent=agent,
        base=tuple(base),
    )
    return _built(trainer_spec(trainer.backend).build_policy, request, "policy")


@builds(preflight=check_reference, groups=trainer_groups, specs=own_specs)
def build_reference(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    images: ImagesConfig | None = None,
) -> Trainer:
    """Build the policy as it was at the start. A reference scores and never learns: no
    gradients, no optimizer.
    """
    request = RoleRequest(
        device=device,
        rank=rank,
        model=_model_here(model, device, trainer),
        trainer=trainer,
        temperature=rollout.temperature,
        images=images,
    )
    return _built(trainer_spec(trainer.backend).build_reference, request, "reference")


@builds(preflight=check_critic, groups=trainer_groups, specs=own_specs)
def build_critic(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    trainer: TrainerConfig,
    images: ImagesConfig | None = None,
) -> Critic:
    """Build a critic that begins as the model in ``model.path``, one of ``rank.size`` that learn
    together.
    """
    model = _model_here(model, device, trainer)
    request = RoleRequest(device=device, rank=rank, model=model, trainer=trainer, images=images)
    return _built(trainer_spec(trainer.backend).build_critic, request, "critic")


def _model_here(model: ModelConfig, device: Device, trainer: TrainerConfig) -> ModelConfig:
    """Return ``model`` with its folder on this host; a backend of the user's own may read others
    than transformers'.
    """
    if trainer.backend in TRAINERS:
        return model_here(model, device)
    return local_model(model, device)


def _built(build: Callable[[RoleRequest], T] | None, request: RoleRequest, role: str) -> T:
    """Return what the backend builds for a ``role``. ConfigError where it builds none."""
    hide()
    with request.device.stage("the loading of weights"):
        return needed(build, request.trainer, role)(request)


@builds(preflight=check_reward_model)
def build_reward_model(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    max_tokens_per_batch: int = 16384,
) -> RewardModel:
    """Build the sequence classifier in ``model.path``. A batch holds ``max_tokens_per_batch``
    tokens, padding included.

    The model reads the policy's token ids, so both need the same tokenizer. ConfigError if the
    folder is unusable.
    """
    hide()
    from siirl_dask.training.reward_model import TorchRewardModel

    model = model_here(model, device, ModelUse.SCORES)
    with device.stage("the loading of weights"):
        return TorchRewardModel(
            model,
            device=device.torch_name,
            budget=max_tokens_per_batch,
            progress=device.progress,
        )


@builds(preflight=check_encoder)
def build_encoder(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    max_tokens: int = ENCODED_TOKENS,
) -> TextEncoder:
    """Build the model in ``model.path`` that encodes texts, of which it reads the first
    ``max_tokens`` tokens.

    It brings its own tokenizer and has nothing to do with the policy's model. ConfigError if the
    folder is unusable.
    """
    hide()
    from siirl_dask.training.encoder import TorchTextEncoder

    model = model_here(model, device, ModelUse.ENCODES)
    with device.stage("the loading of weights"):
        return TorchTextEncoder(
            model,
            device=device.torch_name,
            max_tokens=max_tokens,
            progress=device.progress,
        )
