"""Checks a rollout role before anything starts: its engine, whether its workers can share one,
its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from siirl_dask.config import (
    Config,
    ImagesConfig,
    ModelConfig,
    RolloutConfig,
    check_adapters,
    parse_bytes,
)
from siirl_dask.errors import ConfigError, PlanError, counted
from siirl_dask.images.families import FAMILIES, family_of
from siirl_dask.models.architecture import read_architecture, read_config
from siirl_dask.models.longest_row import check_longest_row
from siirl_dask.models.planned_models import check_model
from siirl_dask.models.routing import read_routing
from siirl_dask.models.shapes import ModelSize, count_parameters, read_widths
from siirl_dask.planner import Footprint, RoleCost
from siirl_dask.rollout.memory import EngineOnWorkers
from siirl_dask.rollout.specs import ENGINES, EngineRole, EngineSpec, check_passed_over, engine_spec

_LISTED_ENGINES = 4  # the rest is only counted


def check_engine(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check a role of ``build_engine`` before anything starts, and return its memory. Of agents
    over one base the first one's role counts the engine.

    PlanError when ``tensor_parallel_size`` does not divide the role's workers; ConfigError for an
    engine that is not there, for what the engine cannot do, and for options of one that ``auto``
    passes over.
    """
    role = EngineRole(
        model=options.get("model", config.model),
        rollout=options.get("rollout", config.rollout),
        config=config,
        images=options.get("images"),
        lora=options.get("lora"),
        workers=len(workers),
    )
    model = role.model
    rollout = role.rollout
    spec = engine_spec(rollout.engine)
    _check_images(role.images, config.images, model.path)
    if rollout.router_replay:
        read_routing(model.path)
    if spec.name in ENGINES:  # another one may have loaders of its own
        check_model(model.path)
    check_stop_tokens(model, rollout)
    check_longest_row(model, role.longest)
    check_passed_over(rollout)
    engine_notes = spec.check(role)
    _check_abilities(spec, role)
    if rollout.in_flight:
        _check_in_flight(spec, role, options.get("base", ()))
    if rollout.tensor_parallel_size > 1:
        _check_workers(rollout.tensor_parallel_size, workers)
    parameters = count_parameters(model.path)
    memory = device = None
    if not spec.memory.on_workers:
        memory = 0
        device = Footprint()
    elif parameters is not None:
        weights = model.dtype.itemsize * parameters.total
        memory = -(-weights // rollout.tensor_parallel_size) + spec.memory.host_cache(rollout)
        if rollout.process:
            memory += weights  # all of them, on each worker, for a process that is started again
        device = _on_device(spec, role, parameters, len(workers))
    notes = (*_notes(rollout, workers), *engine_notes)
    cost = RoleCost(memory=memory, device=device, notes=notes, reads=(model.path,))
    agent = options.get("agent", "")
    base = tuple(options.get("base", ()))
    if not base:
        return cost
    check_adapters(agent, base, role.lora)
    cost = replace(cost, together=f"the engine of {base[0]!r} with adapters of {', '.join(base)}")
    if agent == base[0] or parameters is None:
        return cost
    own = (f"its engine is that of agent {base[0]!r}, which is there once",)
    return replace(cost, memory=0, device=Footprint(), notes=own)


def _check_abilities(spec: EngineSpec, role: EngineRole) -> None:
    """Raise ConfigError for what a run asks of an engine that has no such ability."""
    rollout = role.rollout
    own = spec.abilities
    asked = {}
    if not own.images and role.images is not None and role.images.used:
        asked[role.images.source] = ("takes no images", "images")
    if not own.adapters and role.lora is not None and role.lora.rank:
        asked[f"trainer.lora.rank={role.lora.rank}"] = ("takes whole weights alone", "adapters")
    if not own.routes and rollout.router_replay:
        asked["rollout.router_replay=true"] = ("records no routes", "routes")
    if not own.tensor_parallel and rollout.tensor_parallel_size > 1:
        key = f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}"
        asked[key] = ("is on one worker", "tensor_parallel")
    if not own.drafts and rollout.draft_tokens:
        asked[f"rollout.draft_tokens={rollout.draft_tokens}"] = ("drafts no tokens", "drafts")
    if not own.in_flight and rollout.in_flight:
        reason = "takes no new weights while it generates"
        asked["rollout.in_flight=true"] = (reason, "in_flight")
    if not own.process and rollout.process:
        asked["rollout.process=true"] = ("is built in its worker's process alone", "process")
    if rollout.sampler not in own.samplers:
        asked[f"rollout.sampler={rollout.sampler}"] = (f"has {', '.join(own.samplers)}", "samplers")
    for key, (reason, ability) in asked.items():
        raise ConfigError(
            f"{key}: the engine of rollout.engine={rollout.engine} {reason} "
            f"(EngineSpec.abilities.{ability}); leave it out, or take another engine"
        )


def _check_in_flight(spec: EngineSpec, role: EngineRole, base: Sequence[str]) -> None:
    """Raise ConfigError for images, whose features of older weights nobody forgets, and for
    adapters that rows under way could not change.
    """
    if role.images is not None and role.images.used:
        raise ConfigError(
            f"rollout.in_flight=true with {role.images.source}: features of images would be those "
            "of older weights; leave one of them out"
        )
    if base:
        raise ConfigError(
            f"rollout.in_flight=true, and agents {', '.join(base)} have one engine with adapters of "
            "their own: new ones are taken between steps alone; leave it out"
        )
    lora = role.lora
    if lora is None or not lora.rank:
        return
    if spec.facts.adapter_layers(role.model.dtype, role.rollout, lora, on_cpu=False):
        raise ConfigError(
            f"rollout.in_flight=true with trainer.lora.rank={lora.rank}: on an accelerator "
            f"{spec.name} computes with adapters in layers of its own, where a row keeps those that "
            "it began with; leave it out, or let adapters be merged into weights "
            "(rollout.vllm.engine_kwargs={enable_lora: false})"
        )


def _on_device(
    spec: EngineSpec,
    role: EngineRole,
    size: ModelSize,
    workers: int,
) -> Footprint | None:
    """Return the memory on an accelerator; None for an architecture that is not known."""
    architecture = read_architecture(role.model.path)
    memory = role.config.cluster.device_memory
    if architecture is None:
        return None
    engine = EngineOnWorkers(
        size=size,
        architecture=architecture,
        rollout=role.rollout,
        dtype=role.model.dtype,
        longest=role.longest,
        memory=parse_bytes("cluster.device_memory", memory) if memory else 0,
        lora=role.lora,
    )
    if not spec.abilities.tensor_parallel:
        workers = 1  # more ranks are no remedy
    return spec.memory.on_accelerator(engine, workers)


def engine_groups(options: Mapping[str, Any], workers: int) -> dict[str, int]:
    """Return the number of ranks that an engine is made of, by config key."""
    rollout: RolloutConfig = options["rollout"]
    return {"rollout.tensor_parallel_size": rollout.tensor_parallel_size}


def check_stop_tokens(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a token of ``stop_token_ids`` that the model does not have."""
    if not rollout.stop_token_ids:
        return
    widths = read_widths(model.path)
    if widths is None or widths.vocabulary is None:
        return  # the engine says what is wrong with the folder
    vocabulary = widths.vocabulary
    unknown = [token for token in rollout.stop_token_ids if token >= vocabulary]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids={rollout.stop_token_ids}: the model in {model.path!r} has "
            f"{vocabulary} tokens and no {unknown[0]}"
        )


def _check_images(own: ImagesConfig | None, images: ImagesConfig, path: str) -> None:
    """Raise ConfigError for a model that sees no images where its prompts have some, and for one
    that could see those of the run and is given none; a model that is elsewhere passes.
    """
    if (found := read_config(path)) is None:
        return
    if own is not None and own.used:
        family_of(found, path)
    elif own is None and images.used and found.get("model_type") in FAMILIES:
        raise ConfigError(
            f"{images.source}: build_engine with model.path={path!r} is given no images, and would "
            "take "
            "their places in prompts for text; give it images: ${images}, or for texts alone "
            "images: {column: null}"
        )


def _check_workers(size: int, workers: Sequence[str]) -> None:
    """Raise PlanError when ``size`` does not divide the role's workers."""
    if len(workers) % size:
        raise PlanError(
            f"rollout.tensor_parallel_size={size}, and the role has "
            f"{counted(len(workers), 'worker')}: expected a "
            f"multiple of {size}; change cluster.workers or cluster.placement, or take another size"
        )


def _notes(rollout: RolloutConfig, workers: Sequence[str]) -> tuple[str, ...]:
    """Return a note on which workers share an engine, or have a process for theirs; none where each
    has its own.
    """
    size = rollout.tensor_parallel_size
    notes: tuple[str, ...] = ()
    if rollout.process:
        notes = (
            "its engine is in a process beside each worker, which keeps the weights once more",
        )
    if size == 1:
        return notes
    engines = [" and ".join(workers[at : at + size]) for at in range(0, len(workers), size)]
    more = "; .." if len(engines) > _LISTED_ENGINES else ""
    return (
        *notes,
        f"{counted(len(engines), 'engine')}, {size} workers each: "
        f"{'; '.join(engines[:_LISTED_ENGINES])}{more}",
    )
