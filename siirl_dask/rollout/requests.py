"""Generation requests and their results as plain data, for workers that serve each other's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np

from siirl_dask.errors import PeerError
from siirl_dask.rollout.engine import FinishReason, Generation, GenerationRequest, Sampling


@dataclass(frozen=True, slots=True)
class Sampled:
    """A generation and the name of the worker that made it."""

    generation: Generation
    worker: str


def pack_request(request: GenerationRequest, version: int) -> dict[str, Any]:
    """Return a request as plain data. ``version`` is the version of the weights that must sample it."""
    prompt = np.asarray(request.prompt, "<i8").tobytes()
    return {
        "prompt": prompt,
        "seed": request.seed,
        "sampling": asdict(request.sampling),
        "begun": request.begun,
        "version": version,
    }


def read_request(value: object, version: int) -> GenerationRequest:
    """Return the request in ``value``. PeerError for anything else, and for other weights than ``version``."""
    match value:
        case {
            "prompt": bytes(prompt),
            "seed": int(seed),
            "sampling": dict(sampling),
            "begun": int(begun),
            "version": int(wanted),
        }:
            if wanted != version:
                raise PeerError(f"was given a prompt for weights of version {wanted}: those here are {version}")
            return GenerationRequest(_numbers(prompt, "<i8"), seed, _sampling(sampling), begun)
    raise PeerError(f"received {str(value)[:80]!r}, which is no generation request")


def pack_sampled(sampled: Sampled) -> dict[str, Any]:
    """Return a sample as plain data."""
    sample = sampled.generation
    tokens, logprobs = np.asarray(sample.token_ids, "<i8").tobytes(), np.asarray(sample.logprobs, "<f8").tobytes()
    return {"tokens": tokens, "logprobs": logprobs, "reason": str(sample.finish_reason), "worker": sampled.worker}


def read_sampled(value: object) -> Sampled:
    """Return the sample in ``value``. PeerError for anything else."""
    match value:
        case {"tokens": bytes(tokens), "logprobs": bytes(logprobs), "reason": str(reason), "worker": str(worker)}:
            ids, scores = _numbers(tokens, "<i8"), _numbers(logprobs, "<f8")
            if len(ids) == len(scores) and all(map(isfinite, scores)) and reason in list(FinishReason):
                return Sampled(Generation(ids, scores, FinishReason(reason)), worker)
    raise PeerError(f"received {str(value)[:80]!r}, which is no sample")


def _sampling(message: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters in ``message``. PeerError for anything else."""
    known = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float}
    stops = message.get("stop_token_ids")
    if not isinstance(stops, list | tuple) or not all(isinstance(token, int) for token in stops):
        raise PeerError(f"received {str(stops)[:80]!r} for tokens that end a response")
    valid = message.keys() == {*known, "stop_token_ids"}
    if not valid or not all(isinstance(message[name], int | kind) for name, kind in known.items()):
        raise PeerError(f"received {str(message)[:80]!r}, which are no sampling parameters")
    return Sampling(**{name: kind(message[name]) for name, kind in known.items()}, stop_token_ids=tuple(stops))


def _numbers(packed: bytes, kind: str) -> list[Any]:
    """Return numbers of 8 bytes. PeerError for a length that is no multiple of 8."""
    if len(packed) % 8:
        raise PeerError(f"received {len(packed)} bytes where numbers of 8 were expected")
    return list(np.frombuffer(packed, kind).tolist())
