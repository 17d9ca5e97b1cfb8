"""Engines that generate: ``build_engine`` builds a role's, ``engine.py`` has the protocol that
each of them follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from siirl_dask.config import Config, Engine, ImagesConfig, LoraConfig, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images import load_processor
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.cache import local_model
from siirl_dask.models.planned_models import model_here
from siirl_dask.planner import builds
from siirl_dask.rollout.continued_rows import ContinuedRow
from siirl_dask.rollout.engine import (
    AdaptableEngine,
    DraftsTokens,
    FinishReason,
    Generation,
    GenerationRequest,
    LoadsInFlight,
    LocalQueue,
    RecordsRoutes,
    RequestQueue,
    RolloutEngine,
    RowPasses,
    Sampling,
    SeesImages,
    TakesAdapters,
    Tokenizer,
    WeightStream,
    processor_of,
)
from siirl_dask.rollout.preflight import check_engine, check_stop_tokens, engine_groups
from siirl_dask.rollout.specs import (
    ENGINES,
    Abilities,
    EngineFacts,
    EngineInputs,
    EngineMemory,
    EngineRole,
    EngineSpec,
    Installation,
    check_passed_over,
    engine_spec,
    own_specs,
)

if TYPE_CHECKING:
    from siirl_dask.rollout.server_engine.examination import ExaminedServer

__all__ = [
    "Abilities",
    "ContinuedRow",
    "DraftsTokens",
    "EngineFacts",
    "EngineInputs",
    "EngineMemory",
    "EngineRole",
    "EngineSpec",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Installation",
    "LoadsInFlight",
    "LocalQueue",
    "RecordsRoutes",
    "RequestQueue",
    "RolloutEngine",
    "RowPasses",
    "Sampling",
    "SeesImages",
    "TakesAdapters",
    "Tokenizer",
    "WeightStream",
    "build_engine",
    "check_engine",
    "endpoint",
    "engine",
    "engine_spec",
    "examine_servers",
    "processor_of",
    "requests",
    "servers_go_on",
    "specs",
    "tokenizer",
    "transformers_engine",
]


@builds(preflight=check_engine, groups=engine_groups, specs=own_specs)
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
    """Build the engine that the configuration names, or this rank of it, on this device. ``lora``
    describes the adapters that it will get in place of weights, if it will; ``images`` those of
    prompts, if ``images.column`` is set. ``base`` names agents with adapters over one base, for
    which this worker builds one engine; ``agent`` is this role's.

    ConfigError when ``model.path`` is missing or cannot be loaded, or sees no images where there
    are some.
    """
    spec = engine_spec(rollout.engine)
    inputs = EngineInputs(
        model=model,
        rollout=rollout,
        device=device,
        rank=rank,
        lora=lora,
        images=images,
        agents=tuple(base),
    )
    if not base:
        return _build(spec, inputs)
    from siirl_dask.rollout.shared_engine import AgentEngine, SharedEngine

    def make() -> SharedEngine:
        built = _build(spec, inputs)
        if not isinstance(built, AdaptableEngine):
            raise ConfigError(
                f"rollout.engine={rollout.engine}: the agents {list(base)} are over one base, and "
                "this engine has no fit_adapters and use_adapters (AdaptableEngine); take another "
                "engine, or leave out base"
            )
        return SharedEngine(built)

    return AgentEngine(device.shared(("engine", *base), make), agent)


def examine_servers(config: Config) -> Sequence[ExaminedServer]:
    """Return what each server that the configuration generates with is, or what is wrong with it;
    each is asked at once, and nothing is loaded.
    """
    # imports torch and transformers
    from siirl_dask.rollout.server_engine.examination import examine_servers as examine

    return examine(config)


@contextmanager
def servers_go_on(config: Config, note: Callable[[str], None]) -> Iterator[None]:
    """Let the servers that the configuration generates with go on after the block, where a worker
    that was killed in it has left them paused. ``note`` gets a sentence about each.
    """
    rollouts = [config.rollout, *(agent.rollout for agent in config.agents.values())]
    try:
        yield
    finally:
        if any(rollout.engine == Engine.server for rollout in rollouts):
            # imports torch and transformers
            from siirl_dask.rollout.server_engine.examination import let_go_on

            for sentence in let_go_on(config):
                note(sentence)


def _build(spec: EngineSpec, inputs: EngineInputs) -> RolloutEngine:
    hide()
    rollout = inputs.rollout
    if spec.name in ENGINES:
        model = model_here(inputs.model, inputs.device)
    else:
        model = local_model(inputs.model, inputs.device)
    check_stop_tokens(model, rollout)
    processor = load_processor(model.path, inputs.images)
    spec.installation.check()
    if rollout.tensor_parallel_size > 1 and not spec.abilities.tensor_parallel:
        check_passed_over(rollout)
    inputs = replace(inputs, model=model, processor=processor)
    if not rollout.process:
        return spec.build(inputs)
    # imports torch and transformers
    from siirl_dask.rollout.process_engine.engine import ProcessEngine

    return ProcessEngine(spec, inputs)
