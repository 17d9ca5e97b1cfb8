"""Parameters of a row for vLLM, as plain data: for an engine in this process and for a server. Nothing
here imports vLLM.

Sampling whose log-probs vLLM's own sampler (``rollout.sampler=vllm``) does not report is refused.
Training needs log-probs under softmax(logits / temperature), before top-p, top-k and min-p. vLLM
reports them before the temperature, or after everything, one of them for all requests of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from siirl_dask.config import RolloutConfig, Sampler, ValidationConfig
from siirl_dask.errors import ConfigError
from siirl_dask.rollout.engine import Sampling

EXACT = "processed_logits"
"""vLLM's ``logprobs_mode`` with TokenSampler: it reports the logit that
``VllmTokenSampler.apply`` leaves."""
RAW = "raw_logprobs"
PROCESSED = "processed_logprobs"
"""vLLM's ``logprobs_mode``: before the temperature, and after everything."""
ROW = "siirl_dask"
"""Name of a row's own parameters among vLLM's ``extra_args``."""


def logprobs_mode(rollout: RolloutConfig) -> str:
    """Return the ``logprobs_mode`` of the engine: what it reports as a token's log-probability."""
    return EXACT if rollout.sampler is Sampler.exact else vllm_logprobs_mode(rollout)


def row_parameters(
    seed: int,
    sampling: Sampling,
    end_tokens: Sequence[int],
    begun: int,
    mode: str,
) -> dict[str, Any]:
    """Return arguments of ``vllm.SamplingParams`` for one row, whose prompt ends with ``begun``
    tokens of its response.

    ``mode`` is the engine's ``logprobs_mode``. ConfigError for sampling whose log-probs it does not
    report.
    """
    from siirl_dask.rollout.token_sampling import as_seed, random_bits  # imports torch

    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": [*end_tokens, *sampling.stop_token_ids],
        "ignore_eos": True,  # stop_token_ids has the end tokens
        "logprobs": 0,  # the chosen token's alone
        "detokenize": False,
    }
    if mode == EXACT:
        row = {"seed": as_seed(seed), "sampling": asdict(sampling), "begun": begun}
        return {**params, "temperature": 0.0, "extra_args": {ROW: row}}
    check_vllm_sampling(mode, sampling, "a request")
    # What goes on with a response must not begin again with the random numbers of its beginning.
    bits = int(random_bits(np.array([as_seed(seed)], dtype=np.uint64), begun)[0])
    return {
        **params,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": bits >> 1,  # torch takes no larger ones
    }


def vllm_logprobs_mode(rollout: RolloutConfig) -> str:
    """Return the ``logprobs_mode`` that reports what training needs."""
    return RAW if rollout.temperature == 1 else PROCESSED


def check_vllm_sampling(mode: str, sampling: Sampling, keys: str) -> None:
    """Raise ConfigError, which names ``keys``, for sampling whose log-probs an engine in
    ``mode`` cannot report.
    """
    if (
        sampling.temperature == 0
        or (mode == RAW and sampling.temperature == 1)
        or (mode == PROCESSED and not sampling.filters)
    ):
        return
    reported, expected = {
        RAW: ("before the temperature, since rollout.temperature is 1", "temperature 0 or 1"),
        PROCESSED: (
            "after all of these, since rollout.temperature is not 1",
            "no top_p, top_k and min_p",
        ),
    }[mode]
    raise ConfigError(
        f"rollout.sampler=vllm: {keys} asks for temperature={sampling.temperature}, "
        f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p}, and vLLM reports "
        f"log-probs {reported}: expected {expected}; or take rollout.sampler=exact"
    )


def check_samplings(rollout: RolloutConfig, validation: ValidationConfig) -> None:
    """Raise ConfigError for sampling of a run whose log-probs vLLM's own sampler does not report."""
    mode = vllm_logprobs_mode(rollout)
    way = Sampling(
        max_tokens=1,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )
    check_vllm_sampling(mode, way, "rollout")
    temperature = (
        validation.temperature if validation.temperature is not None else float(validation.n > 1)
    )
    way = Sampling(max_tokens=1, temperature=temperature, top_p=validation.top_p)
    check_vllm_sampling(mode, way, "validation")
