"""The spec of the engine of servers: what must be known of it before it is built."""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.config import Sampler
from siirl_dask.errors import ConfigError, counted
from siirl_dask.models.longest_row import check_frequencies_are_pinned
from siirl_dask.rollout.engine import RolloutEngine
from siirl_dask.rollout.sglang_engine.frequencies import check_frequencies_of_sglang
from siirl_dask.rollout.specs import (
    Abilities,
    EngineInputs,
    EngineMemory,
    EngineRole,
    EngineSpec,
)
from siirl_dask.rollout.vllm_engine.other_logprobs import check_logprobs_of_vllm
from siirl_dask.rollout.vllm_engine.row_parameters import check_samplings

_NAME = "server"


def _check(role: EngineRole) -> Sequence[str]:
    """Raise ConfigError for fewer servers than workers, for a model of which the servers
    compute something else than the trainer, and for sampling whose log-probs vLLM's own sampler
    does not report.
    """
    urls = role.rollout.server.urls
    if len(urls) < role.workers:
        raise ConfigError(
            f"rollout.server.urls has {counted(len(urls), 'server')}, and "
            f"{counted(role.workers, 'worker')} generate: a worker replaces the weights of servers "
            "of its own; start more of them, or place the role that generates on fewer workers "
            "(cluster.placement)"
        )
    if role.rollout.sampler is Sampler.sglang:
        check_frequencies_of_sglang(role.model)
    else:
        check_logprobs_of_vllm(role.model.path, role.longest)
    check_frequencies_are_pinned(role.model)
    if role.rollout.sampler is Sampler.vllm:
        check_samplings(role.rollout, role.config.validation)
    return (
        f"it generates on {counted(len(urls), 'server')}: {', '.join(urls)}; estimated seconds are "
        "those of its workers' devices",
    )


def _build(inputs: EngineInputs) -> RolloutEngine:
    # imports torch and transformers
    from siirl_dask.rollout.server_engine.engine import ServerEngine

    return ServerEngine(inputs.model, inputs.rollout, inputs.device, inputs.rank)


SPEC = EngineSpec(
    name=_NAME,
    build=_build,
    check=_check,
    abilities=Abilities(samplers=(Sampler.exact, Sampler.vllm, Sampler.sglang), adapters=True),
    memory=EngineMemory(on_workers=False),
    advised=False,
)
