"""Reads the bodies of requests: what OpenAI's API has, of which the endpoint serves a part. All
else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import EndpointConfig
from siirl_dask.rollout.endpoint.messages import read_messages, read_tools
from siirl_dask.rollout.endpoint.refusals import Refusal, invalid, unknown_model, unsupported
from siirl_dask.rollout.message_forms import is_shallow

_READ = {"model", "stream", "stream_options", "max_tokens", "stop", "n", "logprobs", "top_logprobs"}
_CHAT = _READ | {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_completion_tokens",
    "response_format",
}
_TEXT = _READ | {"prompt", "echo", "best_of", "suffix"}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"}
"""Fields that the run decides in place of the agent: what is trained is what the run's policy
would have said."""
_NEUTRAL = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that have no meaning here and change no answer."""
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
"""Values of fields that mean what the endpoint does anyway; null does too."""
_MOST_STOPS = 16
_LONGEST_STOP = 256  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request as it is served."""

    chat: bool
    """Whether it is a chat request; else ``prompt`` is a text."""
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()
    prompt: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    """Whether a last chunk of the stream tells the tokens."""
    logprobs: bool = False
    calls_tools: bool = False
    """Whether tool calls are looked for in the answer."""
    overridden: bool = False
    """Whether it had sampling parameters, in place of which the run's are used."""


def read_request(body: bytes, *, chat: bool, config: EndpointConfig) -> Asked:
    """Return the request in a body. Refusal for anything that is not served."""
    given = _read_object(body)
    known = (_CHAT if chat else _TEXT) | _SAMPLING | _NEUTRAL | _DEFAULTS.keys()
    given = {
        name: value
        for name, value in given.items()
        if value is not None and name not in config.ignore
    }
    for name, value in given.items():
        if name not in known:
            raise unsupported(name, value, "the endpoint does not know this field")
        if name in _DEFAULTS and not _is_usual(name, value):
            usual = json.dumps(_DEFAULTS[name][0])
            raise unsupported(
                name, value, f"the endpoint answers as with {usual}", may_ignore=name != "n"
            )
    if given.get("model") != config.model:
        raise unknown_model(given.get("model"), config.model)
    limits = [
        _count(given, name) for name in ("max_tokens", "max_completion_tokens") if name in given
    ]
    options = _options(given, "stream_options") if "stream_options" in given else {}
    tools = read_tools(given.get("tools", []))
    return Asked(
        chat=chat,
        messages=read_messages(given.get("messages"), config.max_messages) if chat else (),
        tools=tools,
        prompt="" if chat else _prompt(given.get("prompt")),
        max_tokens=min(limits, default=None),
        stop=_stops(given.get("stop", [])),
        stream=_flag(given, "stream"),
        stream_usage=_flag(options, "include_usage"),
        logprobs=_logprobs(given, chat=chat),
        calls_tools=bool(tools) and given.get("tool_choice") != "none",
        overridden=bool(_SAMPLING & given.keys()),
    )


def _is_usual(name: str, value: object) -> bool:
    """Return whether a field has a value that means what the endpoint does anyway; true is not
    the number 1.
    """
    return any(
        value == usual and isinstance(value, bool) == isinstance(usual, bool)
        for usual in _DEFAULTS[name]
    )


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body.decode())
        json.dumps(
            given, ensure_ascii=False
        ).encode()  # an escape may stand for half of a character
    except UnicodeError as error:
        raise Refusal(400, f"the body is not UTF-8: {error}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error!s:.200}", code="invalid_json") from error
    if not is_shallow(given):
        raise Refusal(
            400, "the body is nested too deep: expected at most 64 levels", code="invalid_json"
        )
    if not isinstance(given, dict):
        raise Refusal(
            400,
            f"the body is a JSON {type(given).__name__}: expected an object",
            code="invalid_json",
        )
    return given


def _prompt(prompt: object) -> str:
    """Return the prompt of a completion, a text; a list may hold it."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    raise invalid("prompt", prompt, "one text, not empty")


def _count(given: Mapping[str, Any], name: str) -> int:
    value = given[name]
    if type(value) is not int or value < 1:
        raise invalid(name, value, "a whole number of at least 1")
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, value, "true or false")
    return value


def _options(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given[name]
    if not isinstance(value, dict):
        raise invalid(name, value, "an object")
    return value


def _logprobs(given: Mapping[str, Any], *, chat: bool) -> bool:
    """Return whether log-probs are asked for: in a chat a flag, in a completion the number of
    alternatives, 0.
    """
    if chat:
        return _flag(given, "logprobs")
    value = given.get("logprobs")
    if value is None or value is False:
        return False
    if type(value) is int and value in (0, 1):
        return True
    raise unsupported("logprobs", value, "log-probs are those of sampled tokens alone")


def _stops(stop: object) -> tuple[str, ...]:
    given = stop if isinstance(stop, list) else [stop]
    stops = tuple(
        text for text in given if isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP
    )
    if len(stops) < len(given) or len(stops) > _MOST_STOPS:
        raise invalid(
            "stop", stop, f"a text or up to {_MOST_STOPS}, each of 1 to {_LONGEST_STOP} characters"
        )
    return stops
