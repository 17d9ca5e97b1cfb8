"""What the roles that are ours were given: the model, and how it learns or generates."""

from __future__ import annotations

from siirl_dask.config import Config, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.planner import Role
from siirl_dask.planner.canonical import function_name
from siirl_dask.planner.contract import bare, options_of

ENGINE = "siirl_dask.rollout:build_engine"
REFERENCE = "siirl_dask.training:build_reference"
_LEARN = ("siirl_dask.training:build_trainer", "siirl_dask.training:build_critic")


def builder_of(role: Role) -> str:
    """``module:function``."""
    return function_name(bare(role.build))


def model_of(role: Role, config: Config) -> ModelConfig:
    """Of a role that is known to have one."""
    model: ModelConfig = options_of(role.build).get("model", config.model)
    return model


def trainer_of(role: Role, config: Config) -> TrainerConfig | None:
    """How the role learns; None when it does not, or when nobody knows."""
    return placed_by(role, config) if builder_of(role) in _LEARN else None


def placed_by(role: Role, config: Config) -> TrainerConfig | None:
    """How its model lies on its workers, also of one that only scores; None when nobody knows."""
    known = builder_of(role) in (*_LEARN, REFERENCE)
    return options_of(role.build).get("trainer", config.trainer) if known else None


def rollout_of(role: Role, config: Config) -> RolloutConfig | None:
    """How the role generates; None when it does not, or when nobody knows."""
    return options_of(role.build).get("rollout", config.rollout) if builder_of(role) == ENGINE else None
