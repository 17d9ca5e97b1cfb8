"""Engines that generate: ``build_engine`` builds a role's, ``engine.py`` has the protocol that each of them follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from siirl_dask.config import Engine, ImagesConfig, LoraConfig, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images import load_processor
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.cache import local_model
from siirl_dask.models.routing import needed_routing
from siirl_dask.models.shapes import read_widths
from siirl_dask.planner import builds
from siirl_dask.rollout.engine import (
    FinishReason,
    Generation,
    GenerationRequest,
    LocalQueue,
    RequestQueue,
    RolloutEngine,
    Sampling,
    Tokenizer,
    WeightStream,
)
from siirl_dask.rollout.preflight import check_engine, check_no_images_of_sglang, choose_engine, engine_groups

if TYPE_CHECKING:
    from siirl_dask.rollout.shared_engine import AdaptableEngine

__all__ = [
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "LocalQueue",
    "RequestQueue",
    "RolloutEngine",
    "Sampling",
    "Tokenizer",
    "WeightStream",
    "build_engine",
    "check_engine",
    "choose_engine",
]


@builds(preflight=check_engine, groups=engine_groups)
def build_engine(
    device: Device,
    rank: Rank,
    *,
    model: ModelConfig,
    rollout: RolloutConfig,
    lora: LoraConfig | None = None,
    images: ImagesConfig | None = None,
    agent: str = "",
    base: Sequence[str] = (),
) -> RolloutEngine:
    """Build the engine that the configuration names, or this rank of it, on this device. ``lora`` describes the
    adapters that it will get in place of weights, if it will; ``images`` those of prompts, if ``images.column`` is set.
    ``base`` names agents with adapters over one base, for which this worker builds one engine; ``agent`` is this
    role's.

    ConfigError when ``model.path`` is missing or cannot be loaded, or sees no images where there are some.
    """
    if not base:
        return _build(device, rank, model=model, rollout=rollout, lora=lora, images=images)
    from siirl_dask.rollout.shared_engine import AgentEngine, SharedEngine

    def make() -> SharedEngine:
        return SharedEngine(_build(device, rank, model=model, rollout=rollout, lora=lora, images=images, agents=base))

    return AgentEngine(device.shared(("engine", *base), make), agent)


def _build(
    device: Device,
    rank: Rank,
    model: ModelConfig,
    rollout: RolloutConfig,
    lora: LoraConfig | None,
    images: ImagesConfig | None,
    agents: Sequence[str] = (),
) -> AdaptableEngine:
    hide()
    model = local_model(model, device)
    _check_stop_tokens(model, rollout)
    processor = load_processor(model.path, images)
    chosen = choose_engine(rollout.engine)
    if chosen is Engine.sglang:
        check_no_images_of_sglang(images)
        from siirl_dask.rollout.sglang_engine.engine import SglangEngine  # imports torch and transformers

        return SglangEngine(model, rollout, device)
    if chosen is Engine.vllm:
        try:
            from siirl_dask.rollout.vllm_engine.engine import VllmEngine  # imports torch, transformers and vLLM
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"rollout.engine={rollout.engine}: vLLM is installed and cannot be imported: {error}; install it anew, "
                "as docs/engines.md says, or take rollout.engine=transformers"
            ) from error
        return VllmEngine(model, rollout, device=device, rank=rank, lora=lora, processor=processor, agents=agents)
    if rollout.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}: transformers generates on one device, and "
            "vLLM is not installed (rollout.engine=auto); install the extra cpu or gpu, or leave it at 1"
        )
    from siirl_dask.rollout.transformers_engine import TransformersEngine  # imports torch and transformers

    routing = needed_routing(model.path) if rollout.router_replay else None

    with device.stage("the loading of weights"):
        return TransformersEngine(
            model,
            device=device.torch_name,
            max_rows=rollout.max_rows,
            progress=device.progress,
            processor=processor,
            routing=routing,
        )


def _check_stop_tokens(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a token of ``stop_token_ids`` that the model does not have."""
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
