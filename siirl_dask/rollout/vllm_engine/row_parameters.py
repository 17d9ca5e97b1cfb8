"""Parameters of a row for vLLM, as plain data: for an engine in this process and for a server. Nothing
here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from siirl_dask.config import RolloutConfig, Sampler
from siirl_dask.rollout.engine import Sampling
from siirl_dask.rollout.token_sampling import as_seed, random_bits
from siirl_dask.rollout.vllm_engine.own_sampler import check_vllm_sampling, vllm_logprobs_mode

EXACT = "processed_logits"
"""vLLM's ``logprobs_mode`` with TokenSampler: it reports the logit that
``VllmTokenSampler.apply`` leaves."""
ROW = "siirl_dask"
"""Name of a row's own parameters among vLLM's ``extra_args``."""


def logprobs_mode(rollout: RolloutConfig) -> str:
    """Return the ``logprobs_mode`` of the engine: what it reports as a token's log-probability."""
    return EXACT if rollout.sampler is Sampler.exact else vllm_logprobs_mode(rollout)


def row_parameters(
    seed: int, sampling: Sampling, end_tokens: Sequence[int], begun: int, mode: str
) -> dict[str, Any]:
    """Return arguments of ``vllm.SamplingParams`` for one row, whose prompt ends with ``begun``
    tokens of its response.

    ``mode`` is the engine's ``logprobs_mode``. ConfigError for sampling whose log-probs it does not
    report.
    """
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
