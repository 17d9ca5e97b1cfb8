"""Reads what a server answers, which is checked like anything from outside."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from reprlib import repr as short
from typing import Any

from siirl_dask.errors import RunError
from siirl_dask.rollout.engine import FinishReason, Generation, GenerationRequest
from siirl_dask.rollout.vllm_engine.row_parameters import EXACT

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_ENDED_BY_SERVER = "abort"
"""Reason of a response that a server has ended, of either kind: it stops, or somebody asked it to."""
_MOST_TOKENS = 2**31
"""Tokens that any vocabulary may have."""
_VLLMS_NOT_FINITE = -9999.0
"""A log-probability that is no number, or minus infinity, in answers of vLLM: JSON has neither."""
_SGLANGS_NOT_FINITE = "NaN happened"
"""Reason by which SGLang ends a response whose logits are no numbers; it puts an end token last."""
_SHOWN = 200
"""Characters of an error that may have a server's own words."""


class EndedByServerError(Exception):
    """A server has ended a response itself; it may give all of it another time."""


@dataclass(frozen=True, slots=True)
class ServedResponse:
    """A response, and which weights sampled it."""

    generation: Generation
    labels: frozenset[str]
    """Labels of the weights of its tokens: one, but where weights were replaced meanwhile."""


def read_vllm_answer(
    found: object,
    request: GenerationRequest,
    ends: Collection[int],
    mode: str,
    url: str,
) -> ServedResponse:
    """Return the response in what ``/inference/v1/generate`` of vLLM's server at ``url`` answers.
    ``ends`` are the tokens that end any response, ``mode`` is the server's ``logprobs_mode``.

    EndedByServerError for a response that the server has ended. RunError for an answer of another
    form, for log-probs that are missing or not finite, and for a response that ended otherwise than
    by its end or its length.
    """
    try:
        choice = _mapping(_only(_mapping(found)["choices"]))
        if choice["finish_reason"] == _ENDED_BY_SERVER:
            raise EndedByServerError("it has ended the response before its end")
        tokens = [_token(token) for token in _sequence(choice["token_ids"])]
        content = _sequence(_mapping(choice["logprobs"])["content"])
        chosen = [_mapping(each) for each in content]
        logprobs = [_vllms_logprob(each["logprob"]) for each in chosen]
        reported = [_token(each["token_id"]) for each in chosen]
        spans = _sequence(choice["weight_versions"])
        labels = frozenset(str(_mapping(span)["version"]) for span in spans)
        reason = _REASONS[choice["finish_reason"]]
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise _other_form(url, "vLLM 0.32's", error) from error
    if mode == EXACT:
        # the sampler leaves minus the log-probability as the logit of the token that it chose
        logprobs = [-each for each in logprobs]
    generation = Generation(tokens, logprobs, reason)
    expected = f"the server's --logprobs-mode to be {mode}"
    _check(generation, reported, request, ends, url=url, expected=expected)
    return ServedResponse(generation, labels)


def read_sglang_answer(
    found: object,
    request: GenerationRequest,
    ends: Collection[int],
    url: str,
) -> ServedResponse:
    """Return the response in what ``/generate`` of SGLang's server at ``url`` answers. Errors as
    ``read_vllm_answer``.
    """
    try:
        answer = _mapping(found)
        meta = _mapping(answer["meta_info"])
        ended_by = _mapping(meta["finish_reason"])
        if ended_by["type"] == _ENDED_BY_SERVER:
            said = str(ended_by.get("message"))
            raise EndedByServerError(f"it has ended the response: {said:.{_SHOWN}}")
        tokens = [_token(token) for token in _sequence(answer["output_ids"])]
        chosen = [_sequence(each) for each in _sequence(meta["output_token_logprobs"])]
        logprobs = [_sglangs_logprob(each[0]) for each in chosen]
        reported = [_token(each[1]) for each in chosen]
        labels = frozenset([str(meta["weight_version"])])
        if "weight_versions" in meta:  # there where weights were replaced meanwhile
            spans = _sequence(meta["weight_versions"])
            labels |= {str(_mapping(span)["version"]) for span in spans}
        reason = _REASONS[ended_by["type"]]
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _other_form(url, "SGLang 0.5.23's", error) from error
    if ended_by.get("matched") == _SGLANGS_NOT_FINITE:
        raise _not_finite(url)
    generation = Generation(tokens, logprobs, reason)
    _check(generation, reported, request, ends, url=url, expected="log-probabilities of SGLang")
    return ServedResponse(generation, labels)


def _other_form(url: str, known: str, error: Exception) -> RunError:
    """Return the error for an answer that is not understood."""
    return RunError(
        f"{url}: its answer has not the form that {known} has, or the response was ended by "
        f"something else than its end or its length: {type(error).__name__}: {error!s:.{_SHOWN}}"
    )


def _not_finite(url: str) -> RunError:
    """Return the error for logits that are not finite."""
    return RunError(f"{url}: the model gives logits that are not finite")


def _check(
    generation: Generation,
    reported: Sequence[int],
    request: GenerationRequest,
    ends: Collection[int],
    *,
    url: str,
    expected: str,
) -> None:
    """Raise RunError for log-probs that are not those of the tokens (``reported`` are the tokens
    that have them), or no log-probs (``expected`` says of what), and for a response of another
    length or end than was asked for.
    """
    tokens = generation.token_ids
    logprobs = generation.logprobs
    if list(reported) != list(tokens) or not tokens:
        raise RunError(f"{url}: it gave log-probs of other tokens than it sampled")
    if len(tokens) > request.sampling.max_tokens:
        raise RunError(
            f"{url}: it sampled {len(tokens)} tokens, and at most {request.sampling.max_tokens} "
            "were asked for"
        )
    if not all(map(isfinite, logprobs)):
        raise _not_finite(url)
    if max(logprobs) > 0:
        raise RunError(f"{url}: it gave {max(logprobs)} as a log-probability; expected {expected}")
    _check_end(tokens, generation.finish_reason, request, ends, url)


def _check_end(
    tokens: Sequence[int],
    reason: FinishReason,
    request: GenerationRequest,
    ends: Collection[int],
    url: str,
) -> None:
    """Raise RunError for a response that was cut, or goes on after its end: it would be trained as
    one that the policy has ended so.
    """
    stops = {*ends, *request.sampling.stop_token_ids}
    most = request.sampling.max_tokens
    if reason is FinishReason.LENGTH and len(tokens) < most:
        problem = f"it cut a response at {len(tokens)} tokens, and {most} were asked for"
    elif reason is FinishReason.STOP and tokens[-1] not in stops:
        problem = f"it ended a response with the token {tokens[-1]}, which ends none"
    elif not stops.isdisjoint(tokens[:-1]):
        problem = "it went on after a token that ends a response"
    else:
        return
    raise RunError(f"{url}: {problem}; look what there is between this worker and the server")


def _mapping(found: object) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"expected an object, found {type(found).__name__}")
    return found


def _sequence(found: object) -> Sequence[Any]:
    if not isinstance(found, list):
        raise TypeError(f"expected a list, found {type(found).__name__}")
    return found


def _only(found: object) -> object:
    sequence = _sequence(found)
    if len(sequence) != 1:
        raise ValueError(f"expected one choice, found {len(sequence)}")
    return sequence[0]


def _vllms_logprob(found: object) -> float:
    """Return a log-probability; NaN for what vLLM writes where it is not finite."""
    logprob = _number(found)
    if logprob <= _VLLMS_NOT_FINITE:
        return nan
    return logprob


def _sglangs_logprob(found: object) -> float:
    """Return a log-probability; NaN for null, which SGLang writes where it is not finite."""
    if found is None:
        return nan
    return _number(found)


def _number(found: object) -> float:
    if type(found) not in (int, float):
        raise TypeError(f"expected a number, found {short(found)}")
    return float(found)  # type: ignore[arg-type]  # it is one of these


def _token(found: object) -> int:
    if type(found) is not int or not 0 <= found < _MOST_TOKENS:
        raise TypeError(f"expected a token, found {short(found)}")
    return found
