"""The spec of the engine over models of transformers, which needs no further install."""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.config import RolloutConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config
from siirl_dask.models.longest_row import check_frequencies_are_pinned
from siirl_dask.models.planned_models import loop_note
from siirl_dask.models.routing import needed_routing
from siirl_dask.planner import Footprint
from siirl_dask.rollout.engine import RolloutEngine
from siirl_dask.rollout.memory import (
    Change,
    EngineOnWorkers,
    cache_columns,
    cache_rows,
    common_changes,
    rows_of_all_ranks,
    sampler_bytes,
)
from siirl_dask.rollout.specs import (
    Abilities,
    EngineInputs,
    EngineMemory,
    EngineRole,
    EngineSpec,
    Installation,
)

_FLOOR_SCALE = 8192  # where a config of Llama 4 names none


def _check(role: EngineRole) -> Sequence[str]:
    """Return a note on a model that is sampled with transformers' own loop. ConfigError for rotary
    frequencies that nothing pins, and for rows of Llama 4 that padding would change.
    """
    check_frequencies_are_pinned(role.model)
    _check_scaled_attention(role.model.path, role.longest)
    note = loop_note(role.model.path)
    if note is None:
        return ()
    return (note,)


def _check_scaled_attention(path: str, longest: int) -> None:
    """Raise ConfigError for a Llama 4 with rows of up to ``longest`` tokens, where some of its
    layers scale attention by a token's place: ``generate`` counts padding as places.
    """
    config = read_config(path)
    if config is None:
        return
    text = config.get("text_config", config)
    if text.get("model_type") != "llama4_text" or not text.get("attn_temperature_tuning", True):
        return
    limit = text.get("floor_scale", _FLOOR_SCALE)
    if longest >= limit:
        raise ConfigError(
            f"model.path={path!r}: Llama 4 scales attention from {limit} tokens on (floor_scale), "
            "and transformers counts the padding of shorter rows beside a long one: "
            f"data.max_prompt_length + rollout.max_response_length is {longest}, expected less than "
            f"{limit}; or take rollout.engine=vllm"
        )


def _build(inputs: EngineInputs) -> RolloutEngine:
    # imports torch and transformers
    from siirl_dask.rollout.transformers_engine.engine import TransformersEngine

    rollout: RolloutConfig = inputs.rollout
    routing = needed_routing(inputs.model.path) if rollout.router_replay else None
    with inputs.device.stage("the loading of weights"):
        return TransformersEngine(
            inputs.model,
            device=inputs.device.torch_name,
            max_rows=rollout.max_rows,
            progress=inputs.device.progress,
            processor=inputs.processor,
            routing=routing,
            draft_tokens=rollout.draft_tokens,
        )


def _footprint(engine: EngineOnWorkers) -> Footprint:
    """Return the memory of an engine that keeps all weights on the device, and a cache of a
    batch's largest shape.
    """
    size = engine.dtype.itemsize * engine.size.total
    rows = rows_of_all_ranks(engine.rollout)
    tokens = cache_rows(rows) * cache_columns(engine.longest)
    drawn = rows * (1 + engine.rollout.draft_tokens)
    working = {"keys and values": tokens * engine.token_bytes, **sampler_bytes(engine, drawn)}
    return Footprint(held={"weights": size}, working=working, loading=size)


def _changes(engine: EngineOnWorkers, workers: int) -> Sequence[Change]:
    return common_changes(engine)


SPEC = EngineSpec(
    name="transformers",
    build=_build,
    check=_check,
    installation=Installation(library="transformers", by_auto=True),
    abilities=Abilities(
        images=True,
        adapters=True,
        routes=True,
        drafts=True,
        in_flight=True,
        process=True,
    ),
    memory=EngineMemory(footprint=_footprint, changes=_changes),
)
