"""The spec of SGLang's engine: what must be known of it before it is built. Importing it imports
no SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from siirl_dask.config import ImagesConfig, RolloutConfig, Sampler
from siirl_dask.errors import ConfigError
from siirl_dask.models.longest_row import check_frequencies_are_pinned
from siirl_dask.models.shapes import check_no_other_weights, check_no_pattern
from siirl_dask.planner import Footprint
from siirl_dask.rollout.engine import RolloutEngine
from siirl_dask.rollout.memory import (
    CACHE,
    GRAPHS,
    GRAPHS_BYTES,
    Change,
    EngineOnWorkers,
    common_changes,
    rows_of_all_ranks,
    sampler_bytes,
)
from siirl_dask.rollout.sglang_engine.frequencies import check_frequencies_of_sglang
from siirl_dask.rollout.specs import (
    Abilities,
    EngineFacts,
    EngineInputs,
    EngineMemory,
    EngineRole,
    EngineSpec,
    Installation,
    alternatives,
)

_NAME = "sglang"
# of the logits: probabilities, log-probs, hashes, and noise and its sum with log-probs in float64
_COPIES = 7


def _is_installed() -> bool:
    return find_spec("sglang") is not None


def _check_installed() -> None:
    if not _is_installed():
        raise ConfigError(
            "rollout.engine=sglang: SGLang is not installed; install it as docs/engines.md#sglang "
            f"says, or take {alternatives(_NAME)}"
        )


def _check(role: EngineRole) -> Sequence[str]:
    """Raise ConfigError for images, and for rotary frequencies that nothing pins in SGLang."""
    _check_no_images(role.images)
    check_no_pattern(role.model.path, "SGLang")
    check_no_other_weights(role.model.path, "SGLang")
    check_frequencies_of_sglang(role.model)
    check_frequencies_are_pinned(role.model)
    return ()


def _check_no_images(images: ImagesConfig | None) -> None:
    """Raise ConfigError for prompts with images, which the engine does not take."""
    if images is not None and images.used:
        raise ConfigError(
            f"rollout.engine=sglang with {images.source}: images are not passed to SGLang here; "
            f"take {alternatives(_NAME, lambda abilities: abilities.images)}"
        )


def _build(inputs: EngineInputs) -> RolloutEngine:
    _check_no_images(inputs.images)
    # the folder that the files of a URL have come to, where other tools put some as well
    check_no_other_weights(inputs.model.path, "SGLang")
    # imports torch and transformers
    from siirl_dask.rollout.sglang_engine.engine import SglangEngine

    return SglangEngine(inputs.model, inputs.rollout, inputs.device)


def _footprint(engine: EngineOnWorkers) -> Footprint:
    """Return the memory of an engine that keeps weights on the device unless others follow, and
    no copy of them.
    """
    options = engine.rollout.sglang
    least = engine.longest * engine.token_bytes
    return Footprint(
        held={"weights": engine.weights, CACHE: least, GRAPHS: GRAPHS_BYTES},
        working=sampler_bytes(engine, rows_of_all_ranks(engine.rollout), _COPIES),
        leaves=(CACHE,) if options.sleep else (),
        fills=CACHE,
        least=least,
        share=options.mem_fraction_static,
        share_key="rollout.sglang.mem_fraction_static",
    )


def _changes(engine: EngineOnWorkers, workers: int) -> Sequence[Change]:
    return common_changes(engine)


def _reads_prompts_once(rollout: RolloutConfig) -> bool:
    return not rollout.sglang.disable_radix_cache


SPEC = EngineSpec(
    name=_NAME,
    build=_build,
    check=_check,
    installation=Installation(library="SGLang", found=_is_installed, check=_check_installed),
    abilities=Abilities(samplers=(Sampler.sglang,), adapters=True),
    memory=EngineMemory(footprint=_footprint, changes=_changes),
    facts=EngineFacts(reads_prompts_once=_reads_prompts_once),
)
