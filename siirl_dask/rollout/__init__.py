"""Engines that generate. ``build_engine`` is a role's ``build``; what an engine must do is in ``engine.py``."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from siirl_dask.config import Engine, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.parameters import read_widths
from siirl_dask.rollout.engine import (
    AnnouncedWeights,
    FinishReason,
    Generation,
    GenerationRequest,
    OwnWork,
    RolloutEngine,
    Sampling,
    Tokenizer,
    Work,
)

__all__ = [
    "AnnouncedWeights",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "OwnWork",
    "RolloutEngine",
    "Sampling",
    "Tokenizer",
    "Work",
    "build_engine",
    "choose_engine",
]

logger = logging.getLogger("siirl_dask.rollout")


def build_engine(device: Device, rank: Rank, *, model: ModelConfig, rollout: RolloutConfig) -> RolloutEngine:
    """The engine the config names, or this rank of it, on this device. ConfigError when ``model.path`` is missing or
    cannot be loaded.
    """
    _refuse_unknown_tokens(model, rollout)
    if choose_engine(rollout.engine) is Engine.vllm:
        try:
            from siirl_dask.rollout.vllm_engine import VllmEngine  # imports torch, transformers and vLLM
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"rollout.engine={rollout.engine}: vLLM is installed and cannot be imported: {error}; install it anew, "
                "as docs/engines.md says, or take rollout.engine=transformers"
            ) from error
        return VllmEngine(model, rollout, device, rank)
    if rollout.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}: transformers generates on one device, and "
            "vLLM is not installed (rollout.engine=auto); install the extra cpu, gpu or npu, or leave it at 1"
        )
    from siirl_dask.rollout.transformers_engine import TransformersEngine  # imports torch and transformers

    return TransformersEngine(model, device=device.torch_name, max_rows=rollout.max_rows)


def _refuse_unknown_tokens(model: ModelConfig, rollout: RolloutConfig) -> None:
    """ConfigError for a ``stop_token_ids`` that the model can never sample."""
    if not rollout.stop_token_ids:
        return
    widths = read_widths(model.path)
    if widths is None or (vocabulary := widths.vocabulary) is None:
        return  # the engine says what is wrong with the folder
    if unknown := [token for token in rollout.stop_token_ids if token >= vocabulary]:
        raise ConfigError(
            f"rollout.stop_token_ids={rollout.stop_token_ids}: the model in {model.path!r} has {vocabulary} tokens and "
            f"no {unknown[0]}"
        )


def choose_engine(engine: Engine) -> Engine:
    """``auto`` as one that is here, and says so. ConfigError when vLLM is asked for and not installed."""
    installed = find_spec("vllm") is not None
    if engine is Engine.vllm and not installed:
        raise ConfigError(
            "rollout.engine=vllm: vLLM is not installed; install the extra cpu, gpu or npu, as in "
            "pip install 'siirl_dask[cpu]', or take rollout.engine=transformers"
        )
    if engine is not Engine.auto:
        return engine
    chosen = Engine.vllm if installed else Engine.transformers
    logger.info("rollout.engine=auto takes %s: vLLM is %sinstalled", chosen, "" if installed else "not ")
    return chosen
