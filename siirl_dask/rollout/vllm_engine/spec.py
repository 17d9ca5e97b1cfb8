"""The spec of vLLM's engine: what must be known of it before it is built. Importing it imports
no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.config import ModelConfig, RolloutConfig, Sampler
from siirl_dask.errors import ConfigError, clause
from siirl_dask.models.shapes import check_no_other_weights, check_no_pattern, read_widths
from siirl_dask.rollout.engine import RolloutEngine
from siirl_dask.rollout.specs import (
    Abilities,
    EngineFacts,
    EngineInputs,
    EngineMemory,
    EngineMoves,
    EngineRole,
    EngineSpec,
    Installation,
)
from siirl_dask.rollout.vllm_engine.adapter_choice import takes_layers
from siirl_dask.rollout.vllm_engine.installation import (
    ENVIRONMENT,
    check_installed,
    check_passed_over,
    is_installed,
)
from siirl_dask.rollout.vllm_engine.memory import (
    changes,
    footprint,
    graphs_bytes,
    host_cache,
    rows_in_batch,
)
from siirl_dask.rollout.vllm_engine.other_logprobs import (
    check_engine_length,
    check_logprobs_of_vllm,
)
from siirl_dask.rollout.vllm_engine.row_parameters import check_samplings

_VOCABULARY_MULTIPLE = 64  # vLLM pads a vocabulary to a multiple of this
_SAME_FILES = {
    "load_format": ("hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
    "config_format": ("hf",),
}
"""Values of vLLM's options by which it reads the files that trainers read. By its default,
``auto``, it prefers those of Mistral's library, which may be of another model."""
_FORGETS = 2  # ``rollout.vllm.sleep_level``


def _check(role: EngineRole) -> Sequence[str]:
    """Raise ConfigError for a model of which vLLM computes something else than the trainer, for one
    that ``tensor_parallel_size`` does not divide, and for sampling whose log-probs its own sampler
    does not report.
    """
    rollout = role.rollout
    check_no_pattern(role.model.path, "vLLM")
    check_no_other_weights(role.model.path, "vLLM")
    _check_formats(rollout)
    length = rollout.vllm.engine_kwargs.get("max_model_len")
    if isinstance(length, int) and length > 0:
        check_engine_length(role.model, length)
    check_logprobs_of_vllm(role.model.path, role.longest)
    if rollout.sampler is Sampler.vllm:
        check_samplings(rollout, role.config.validation)
    if rollout.tensor_parallel_size > 1:
        _check_divides(rollout.tensor_parallel_size, role.model)
    return ()


def _check_formats(rollout: RolloutConfig) -> None:
    """Raise ConfigError for options by which vLLM would read other files than trainers do."""
    for name, values in _SAME_FILES.items():
        chosen = rollout.vllm.engine_kwargs.get(name, values[0])
        if chosen not in values:
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.{name}={chosen!r}: vLLM would not read the files that "
                f"the trainer reads; expected {' or '.join(values)}, or leave it out"
            )


def _check_divides(size: int, model: ModelConfig) -> None:
    """Raise ConfigError when ``size`` does not divide the model; one that is elsewhere passes."""
    if (widths := read_widths(model.path)) is None:
        return
    heads = widths.heads
    intermediate = widths.intermediate
    vocabulary = widths.vocabulary
    kv_heads = widths.kv_heads if widths.kv_heads else heads
    parts = []
    if heads and heads % size:
        parts.append(f"{heads} attention heads")
    # each rank has some of them, or some ranks have the same one
    if kv_heads and max(kv_heads, size) % min(kv_heads, size):
        parts.append(f"{kv_heads} key and value heads")
    if intermediate and intermediate % size:
        parts.append(f"{intermediate} numbers between the layers of its MLPs")
    if vocabulary:
        padded = -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        if padded % size:
            parts.append(f"{vocabulary} tokens of its vocabulary")
    if parts:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: the model in model.path={model.path!r} has "
            f"{', '.join(parts)}, which {size} workers cannot share evenly; take a divisor of its "
            f"{heads} attention heads"
        )


def _build(inputs: EngineInputs) -> RolloutEngine:
    # the folder that the files of a URL have come to, where other tools put some as well
    check_no_other_weights(inputs.model.path, "vLLM")
    try:
        # imports torch, transformers and vLLM
        from siirl_dask.rollout.vllm_engine.engine import VllmEngine
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"rollout.engine={inputs.rollout.engine}: vLLM is installed and cannot be imported: "
            f"{clause(error)}; install it "
            "anew, as docs/engines.md says, or take rollout.engine=transformers"
        ) from error
    return VllmEngine(
        inputs.model,
        inputs.rollout,
        device=inputs.device,
        rank=inputs.rank,
        lora=inputs.lora,
        processor=inputs.processor,
        agents=inputs.agents,
    )


def _reads_prompts_once(rollout: RolloutConfig) -> bool:
    return rollout.vllm.enable_prefix_caching


def _moves(rollout: RolloutConfig) -> EngineMoves:
    level = rollout.vllm.sleep_level
    return EngineMoves(sleeps=level > 0, forgets=level == _FORGETS, graphs=graphs_bytes(rollout))


SPEC = EngineSpec(
    name="vllm",
    build=_build,
    check=_check,
    installation=Installation(
        library="vLLM",
        found=is_installed,
        check=check_installed,
        by_auto=True,
        check_passed_over=check_passed_over,
    ),
    abilities=Abilities(
        samplers=(Sampler.exact, Sampler.vllm),
        images=True,
        adapters=True,
        routes=True,
        tensor_parallel=True,
        in_flight=True,
        process=True,
    ),
    memory=EngineMemory(host_cache=host_cache, footprint=footprint, changes=changes),
    facts=EngineFacts(
        rows=rows_in_batch,
        reads_prompts_once=_reads_prompts_once,
        adapter_layers=takes_layers,
        widens_head=False,  # on GPUs; on a CPU it does
        moves=_moves,
    ),
    environment=ENVIRONMENT,
)
