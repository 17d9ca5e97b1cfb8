"""Answers of the endpoint: what was sampled as a message with its tool calls, and as OpenAI's
objects.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.rollout.endpoint.requests import Asked
from siirl_dask.rollout.engine import FinishReason, Generation, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer to a request, before it becomes JSON."""

    generation: Generation
    """The sampled tokens that count: those up to the end of a stop string."""
    text: str
    """The answer without special tokens and without the stop string."""
    message: dict[str, Any]
    """The assistant's message, for a chat request, in the form that the chat template reads."""
    prompt_tokens: int


def up_to_stop(
    generation: Generation, stops: Sequence[str], tokenizer: Tokenizer
) -> tuple[Generation, str]:
    """Return the tokens up to the first that completes one of the strings, and the text before it.

    An engine that looked for the string while it sampled would have stopped there: the tokens
    before do not depend on those after.
    """

    def text_of(count: int) -> str:
        return tokenizer.decode(generation.token_ids[:count], skip_special=True)

    text = text_of(len(generation.token_ids))
    count = len(generation.token_ids)
    if not any(stop in text for stop in stops):
        return generation, text
    # texts of more tokens contain those of fewer, but for a character that is not whole yet, of
    # which no stop consists
    length = 1 + bisect_left(
        range(1, count), True, key=lambda length: any(stop in text_of(length) for stop in stops)
    )
    text = text_of(length)
    first = min(text.index(stop) for stop in stops if stop in text)
    cut = Generation(generation.token_ids[:length], generation.logprobs[:length], FinishReason.STOP)
    return cut, text[:first]


def chat_body(
    asked: Asked,
    answer: Answer,
    head: dict[str, Any],
    decode: Callable[[int], str],
) -> dict[str, Any]:
    """Return the answer to a chat request as OpenAI's object ``chat.completion``."""
    choice = {"index": 0, "message": _sent(answer.message), "finish_reason": _reason(answer)}
    choice["logprobs"] = None
    if asked.logprobs:
        choice["logprobs"] = {"content": _chat_logprobs(answer.generation, decode)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


def text_body(
    asked: Asked,
    answer: Answer,
    head: dict[str, Any],
    decode: Callable[[int], str],
) -> dict[str, Any]:
    """Return the answer to a completion request as OpenAI's object ``text_completion``."""
    choice = {"index": 0, "text": answer.text, "finish_reason": _reason(answer)}
    choice["logprobs"] = None
    if asked.logprobs:
        choice["logprobs"] = _text_logprobs(answer.generation, decode)
    return {**head, "object": "text_completion", "choices": [choice], "usage": _usage(answer)}


def chunks(asked: Asked, body: dict[str, Any]) -> Iterator[str]:
    """Yield the events of a stream that give the same answer: it is sampled whole, and sent as
    few pieces.
    """
    choice = body["choices"][0]
    usage = body["usage"]
    head = {name: body[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if asked.chat else "text_completion"
    if asked.chat:
        message = choice["message"]
        calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        pieces = [
            {"delta": delta, "finish_reason": None},
            {"delta": {}, "finish_reason": choice["finish_reason"]},
        ]
    else:
        pieces = [{"text": choice["text"], "finish_reason": choice["finish_reason"]}]
    pieces[0]["logprobs"] = choice["logprobs"]
    for piece in pieces:
        yield _event({**head, "choices": [{"index": 0, **piece}]})
    if asked.stream_usage:
        yield _event({**head, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as clients get it: arguments of tool calls are JSON in a text."""
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _as_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments)


def _reason(answer: Answer) -> str:
    if answer.generation.finish_reason is FinishReason.LENGTH:
        return "length"
    if answer.message.get("tool_calls"):
        return "tool_calls"
    return "stop"


def _usage(answer: Answer) -> dict[str, int]:
    asked = answer.prompt_tokens
    given = len(answer.generation.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}


def _chat_logprobs(generation: Generation, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    return [
        {"token": text, "bytes": [*text.encode()], "logprob": logprob, "top_logprobs": []}
        for text, logprob in zip(
            map(decode, generation.token_ids), generation.logprobs, strict=True
        )
    ]


def _text_logprobs(generation: Generation, decode: Callable[[int], str]) -> dict[str, Any]:
    tokens = [*map(decode, generation.token_ids)]
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": generation.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }
