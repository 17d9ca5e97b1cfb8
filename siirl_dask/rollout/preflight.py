"""Checks a rollout role before anything starts: which engine it gets, whether its workers can share one, its memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from siirl_dask.config import (
    Config,
    Engine,
    ImagesConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    Sampler,
    ValidationConfig,
    changed_options,
    parse_bytes,
)
from siirl_dask.config.agents import check_adapters
from siirl_dask.devices import DeviceKind, traits_of
from siirl_dask.errors import ConfigError, PlanError, counted
from siirl_dask.images.families import FAMILIES, family_of
from siirl_dask.models.architecture import read_architecture, read_config
from siirl_dask.models.longest_row import check_frequencies_are_pinned, check_frequencies_of_sglang, check_longest_row
from siirl_dask.models.routing import read_routing
from siirl_dask.models.shapes import ModelSize, count_parameters, read_widths
from siirl_dask.models.slower_families import loop_note
from siirl_dask.planner import Footprint, RoleCost
from siirl_dask.rollout.engine import CPU_CACHE, Sampling
from siirl_dask.rollout.memory import EngineOnWorkers, engine_footprint
from siirl_dask.rollout.vllm_engine.other_logprobs import check_logprobs_of_vllm
from siirl_dask.rollout.vllm_sampler import check_vllm_sampling, vllm_logprobs_mode

logger = logging.getLogger("siirl_dask.rollout")
_VOCABULARY_MULTIPLE = 64  # vLLM pads a vocabulary to a multiple of this
_LISTED_ENGINES = 4  # the rest is only counted


def choose_engine(engine: Engine) -> Engine:
    """Return ``engine``, or for ``auto`` one that is installed here. ConfigError for vLLM and SGLang where they are not
    installed.
    """
    if engine is Engine.sglang:
        _check_sglang_is_installed()
        return engine
    installed = find_spec("vllm") is not None
    if engine is Engine.vllm and not installed:
        raise ConfigError(
            "rollout.engine=vllm: vLLM is not installed; install the extra cpu or gpu, as in pip install "
            "'siirl_dask[cpu]', on NPUs as docs/engines.md#vllm-on-npus says, or take rollout.engine=transformers"
        )
    if installed and engine is not Engine.transformers:
        check_plugins_of_vllm()
    if engine is not Engine.auto:
        return engine
    chosen = Engine.vllm if installed else Engine.transformers
    logger.info("rollout.engine=auto takes %s: vLLM is %sinstalled", chosen, "" if installed else "not ")
    return chosen


def takes_vllm(engine: Engine) -> bool:
    """Return whether vLLM generates: where it is named the workers may have it, whatever is installed here."""
    return engine is Engine.vllm or (engine is Engine.auto and choose_engine(engine) is Engine.vllm)


def _check_sglang_is_installed() -> None:
    if find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine=sglang: SGLang is not installed; install it as docs/engines.md#sglang says, or take "
            "rollout.engine=vllm or transformers"
        )


def check_no_images_of_sglang(images: ImagesConfig | None) -> None:
    """Raise ConfigError for prompts with images, which the engine of SGLang does not take."""
    if images is not None and images.used:
        raise ConfigError(
            f"rollout.engine=sglang with {images.source}: images are not passed to SGLang here; take "
            "rollout.engine=vllm or transformers"
        )


def check_plugins_of_vllm() -> None:
    """Check that a package that adds a kind of device to vLLM is of vLLM's own release. ConfigError if not."""
    vllm = _release("vllm")
    for name in (traits.vllm for traits in map(traits_of, DeviceKind) if traits.plugin is not None):
        plugin = _release(name)
        if vllm is not None and plugin is not None and vllm.release != plugin.release:
            raise ConfigError(
                f"rollout.engine: vllm {vllm} and {name} {plugin} do not go together: install {name}'s release of "
                "vLLM, as docs/engines.md#vllm-on-npus says, or take rollout.engine=transformers"
            )


def _release(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def check_engine(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check a role of ``build_engine`` before anything starts, and return its memory. Of agents over one base the first
    one's role counts the engine.

    PlanError when ``tensor_parallel_size`` does not divide the role's workers; ConfigError when it does not divide the
    model, if that is on this machine, for a model that does not see the images that there are, and for options of vLLM
    where ``auto`` takes transformers.
    """
    model: ModelConfig = options.get("model", config.model)
    rollout: RolloutConfig = options.get("rollout", config.rollout)
    _check_images(options.get("images"), config.images, model.path)
    if rollout.router_replay:
        read_routing(model.path)
    if rollout.engine is Engine.sglang:
        check_no_images_of_sglang(options.get("images"))
    uses_vllm = takes_vllm(rollout.engine)
    longest = config.data.max_prompt_length + rollout.max_response_length
    length = rollout.vllm.engine_kwargs.get("max_model_len") if uses_vllm else None
    check_longest_row(model, longest, engine_length=length if isinstance(length, int) and length > 0 else None)
    if uses_vllm:
        check_logprobs_of_vllm(model.path, longest)
    if rollout.engine is Engine.sglang:
        check_frequencies_of_sglang(model)
    if not uses_vllm:
        _check_no_vllm_options(rollout)
        check_frequencies_are_pinned(model)
    if rollout.sampler is Sampler.vllm:
        _check_samplings(rollout, config.validation)
    if rollout.tensor_parallel_size > 1:
        _check_workers(rollout.tensor_parallel_size, workers)
        _check_model(rollout.tensor_parallel_size, model.path)
    parameters = count_parameters(model.path)
    memory = device = None
    if parameters is not None:
        weights = -(-model.dtype.itemsize * parameters.total // rollout.tensor_parallel_size)
        memory = weights + _cache(rollout, uses_vllm)
        lora = options.get("lora")
        device = _on_device(
            parameters, model, rollout=rollout, workers=workers, config=config, vllm=uses_vllm, lora=lora
        )
    notes = _notes(rollout.tensor_parallel_size, workers)
    if not uses_vllm and rollout.engine is not Engine.sglang:
        loop = loop_note(model.path)
        notes += () if loop is None else (loop,)
    cost = RoleCost(memory=memory, device=device, notes=notes, reads=(model.path,))
    agent = options.get("agent", "")
    base = tuple(options.get("base", ()))
    if not base:
        return cost
    check_adapters(agent, base, options.get("lora"))
    cost = replace(cost, together=f"the engine of {base[0]!r} with adapters of {', '.join(base)}")
    if agent == base[0] or parameters is None:
        return cost
    own = (f"its engine is that of agent {base[0]!r}, which is there once",)
    return replace(cost, memory=0, device=Footprint(), notes=own)


def _on_device(
    size: ModelSize,
    model: ModelConfig,
    rollout: RolloutConfig,
    workers: Sequence[str],
    config: Config,
    vllm: bool,
    lora: LoraConfig | None,
) -> Footprint | None:
    """Return the memory on an accelerator; None for an architecture that is not known."""
    architecture = read_architecture(model.path)
    memory = config.cluster.device_memory
    if architecture is None:
        return None
    engine = EngineOnWorkers(
        size=size,
        architecture=architecture,
        rollout=rollout,
        dtype=model.dtype,
        longest=config.data.max_prompt_length + rollout.max_response_length,
        vllm=vllm,
        memory=parse_bytes("cluster.device_memory", memory) if memory else 0,
        lora=lora,
    )
    return engine_footprint(engine, len(workers))


def engine_groups(options: Mapping[str, Any], workers: int) -> dict[str, int]:
    """Return the number of ranks that an engine is made of, by config key."""
    rollout: RolloutConfig = options["rollout"]
    return {"rollout.tensor_parallel_size": rollout.tensor_parallel_size}


def _check_no_vllm_options(rollout: RolloutConfig) -> None:
    """Raise ConfigError for an option that only vLLM reads, where ``auto`` falls back to transformers."""
    options = changed_options("rollout.vllm", rollout.vllm)
    if rollout.tensor_parallel_size > 1:
        options["rollout.tensor_parallel_size"] = rollout.tensor_parallel_size
    if rollout.sampler is Sampler.vllm:
        options["rollout.sampler"] = rollout.sampler
    if rollout.engine is Engine.auto and options:
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ConfigError(
            f"{shown}: only vLLM reads this, and rollout.engine=auto takes transformers: vLLM is not installed here; "
            "take rollout.engine=vllm if the workers have it, or leave this out"
        )


def _check_samplings(rollout: RolloutConfig, validation: ValidationConfig) -> None:
    """Raise ConfigError for sampling whose log-probs vLLM's own sampler does not report."""
    mode = vllm_logprobs_mode(rollout)
    way = Sampling(
        max_tokens=1,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )
    check_vllm_sampling(mode, way, "rollout")
    temperature = validation.temperature if validation.temperature is not None else float(validation.n > 1)
    way = Sampling(max_tokens=1, temperature=temperature, top_p=validation.top_p)
    check_vllm_sampling(mode, way, "validation")


def _check_images(own: ImagesConfig | None, images: ImagesConfig, path: str) -> None:
    """Raise ConfigError for a model that sees no images where its prompts have some, and for one that could see those
    of the run and is given none; a model that is elsewhere passes.
    """
    if (found := read_config(path)) is None:
        return
    if own is not None and own.used:
        family_of(found, path)
    elif own is None and images.used and found.get("model_type") in FAMILIES:
        raise ConfigError(
            f"{images.source}: build_engine with model.path={path!r} is given no images, and would take "
            "their places in prompts for text; give it images: ${images}, or for texts alone images: {column: null}"
        )


def _check_workers(size: int, workers: Sequence[str]) -> None:
    """Raise PlanError when ``size`` does not divide the role's workers."""
    if len(workers) % size:
        raise PlanError(
            f"rollout.tensor_parallel_size={size}, and the role has {counted(len(workers), 'worker')}: expected a "
            f"multiple of {size}; change cluster.workers or cluster.placement, or take another size"
        )


def _check_model(size: int, path: str) -> None:
    """Raise ConfigError when ``size`` does not divide the model in ``path``; a model that is elsewhere passes."""
    if (widths := read_widths(path)) is None:
        return
    heads = widths.heads
    intermediate = widths.intermediate
    vocabulary = widths.vocabulary
    kv_heads = widths.kv_heads or heads
    padded = None if vocabulary is None else -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    indivisible = {
        "attention heads": heads if heads and heads % size else None,
        # each rank has some of them, or some ranks have the same one
        "key and value heads": kv_heads if kv_heads and max(kv_heads, size) % min(kv_heads, size) else None,
        "numbers between the layers of its MLPs": intermediate if intermediate and intermediate % size else None,
        "tokens of its vocabulary": vocabulary if padded and padded % size else None,
    }
    if parts := [f"{number} {part}" for part, number in indivisible.items() if number is not None]:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: the model in model.path={path!r} has {', '.join(parts)}, which "
            f"{size} workers cannot share evenly; take a divisor of its {heads} attention heads"
        )


def _cache(rollout: RolloutConfig, uses_vllm: bool) -> int:
    """Return the bytes of an engine's KV cache; 0 on an accelerator, where vLLM takes what is left of the memory."""
    size = rollout.vllm.kv_cache_memory or (CPU_CACHE if uses_vllm else None)
    return parse_bytes("rollout.vllm.kv_cache_memory", size) if size else 0


def _notes(size: int, workers: Sequence[str]) -> tuple[str, ...]:
    """Return a note on which workers share an engine; none where each has its own."""
    if size == 1:
        return ()
    engines = [" and ".join(workers[at : at + size]) for at in range(0, len(workers), size)]
    more = "; .." if len(engines) > _LISTED_ENGINES else ""
    return (f"{len(engines)} engines, {size} workers each: {'; '.join(engines[:_LISTED_ENGINES])}{more}",)
