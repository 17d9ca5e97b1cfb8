"""Turns a generation request into SGLang's sampling parameters, and what SGLang reports into a
generation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from siirl_dask.errors import ConfigError, RunError, counted
from siirl_dask.rollout.engine import FinishReason, Generation, GenerationRequest, Sampling
from siirl_dask.rollout.token_sampling import as_seed

_ALL = -1  # SGLang's top_k for all tokens
_SIGNED = 2**63


def sampling_params(request: GenerationRequest, end_tokens: Collection[int]) -> dict[str, Any]:
    """Return SGLang's parameters of one row. ConfigError for sampling that it cannot do with seeds.

    A token's random numbers are a hash of the seed and of its place in the whole sequence: a
    response that was interrupted goes on as if it was not.
    """
    sampling = request.sampling
    _check(sampling)
    seed = as_seed(request.seed)
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or _ALL,
        "stop_token_ids": sorted({*end_tokens, *sampling.stop_token_ids}),
        "sampling_seed": seed - 2 * _SIGNED if seed >= _SIGNED else seed,
    }


def _check(sampling: Sampling) -> None:
    if sampling.min_p > 0:
        raise ConfigError(
            f"rollout.sampler=sglang: a request asks for min_p={sampling.min_p}, which SGLang's "
            "sampler does not take together with seeds; leave it at 0, or take another engine"
        )
    if sampling.top_k == 1 and sampling.temperature not in (0, 1):
        raise ConfigError(
            "rollout.sampler=sglang: a request asks for top_k=1 and "
            f"temperature={sampling.temperature}, where SGLang "
            "tells log-probs of temperature 1; give temperature 0 or 1, or another top_k"
        )


def read_generation(
    reported: Mapping[str, Any], request: GenerationRequest, version: int
) -> Generation:
    """Return a finished response. RunError where SGLang ended it for another reason than its end or
    its length, tells log-probs of other tokens, or some that are not finite.
    """
    meta = reported["meta_info"]
    tokens = list(reported["output_ids"])
    logprobs = [float(logprob) for logprob, *_ in meta["output_token_logprobs"]]
    reason = _reason(meta["finish_reason"], version)
    if [token for _, token, *_ in meta["output_token_logprobs"]] != tokens:
        raise RunError(
            f"SGLang told log-probs of other tokens than it sampled, in request {meta['id']}"
        )
    if reason is FinishReason.LENGTH and len(tokens) != request.sampling.max_tokens:
        raise RunError(
            f"SGLang ended a response after {counted(len(tokens), 'token')}, which may have "
            f"{request.sampling.max_tokens}: its cache of keys and values is too small for it "
            "(rollout.sglang.mem_fraction_static)"
        )
    if not all(map(isfinite, logprobs)):
        raise not_finite(version)
    return Generation(tokens, logprobs, reason)


def _reason(finish: Mapping[str, Any], version: int) -> FinishReason:
    match finish:
        case {"type": "stop", "matched": int()}:
            return FinishReason.STOP
        case {"type": "length"}:
            return FinishReason.LENGTH
        case {"type": "stop", "matched": "NaN happened"}:
            raise not_finite(version)
    raise RunError(
        f"SGLang ended a response otherwise than by its end or its length: {dict(finish)}"
    )


def not_finite(version: int) -> RunError:
    """Return the error for logits of a model that are not finite."""
    return RunError(f"the model gives logits that are not finite (weights of version {version})")
