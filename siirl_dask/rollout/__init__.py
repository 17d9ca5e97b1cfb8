"""Engines that generate. ``build_engine`` is a role's ``build``; what an engine must do is in ``engine.py``."""

from __future__ import annotations

from siirl_dask.config import Engine, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rollout.engine import FinishReason, Generation, RolloutEngine, Sampling, Tokenizer

__all__ = ["FinishReason", "Generation", "RolloutEngine", "Sampling", "Tokenizer", "build_engine"]


def build_engine(device: Device, rank: Rank, *, model: ModelConfig, rollout: RolloutConfig) -> RolloutEngine:
    """The engine the config names, on this device. ConfigError when ``model.path`` is missing or cannot be loaded."""
    match rollout.engine:
        case Engine.transformers:
            from siirl_dask.rollout.transformers_engine import TransformersEngine  # imports torch and transformers

            return TransformersEngine(model, device=device.torch_name, max_rows=rollout.max_rows)
