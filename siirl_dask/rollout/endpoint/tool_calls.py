"""Finds the tool calls in what a model wrote, by the tokenizer's own rules or by those of Hermes
and Qwen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from siirl_dask.rollout.engine import Tokenizer
from siirl_dask.rollout.message_forms import arguments_of, is_shallow

HERMES: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, for tokenizers that say nothing:
most of them."""


def read_message(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    text: str,
    prompt: Sequence[int],
    tools: Sequence[Any],
    first: int,
) -> dict[str, Any]:
    """Return the assistant's message in sampled tokens, whose ``text`` is given; ``tools`` are
    those it may call.

    Its tool calls are numbered from ``first``. What does not parse is plain content, for the agent
    to complain about.
    """
    plain = {"role": "assistant", "content": text}
    template = getattr(tokenizer, "response_template", None)
    if template is not None:
        text = tokenizer.decode(token_ids, skip_special=False)
    elif not tools:
        return plain
    from transformers.utils.chat_parsing import parse_response  # not where a DAG is only planned

    before = tokenizer.decode(prompt, skip_special=False)
    if template is None and HERMES["start_anchor"] not in before:
        before = ""  # or all of the prompt would count as the answer's beginning
    try:
        parsed = parse_response(text, dict(template or HERMES), prefix=before, tools=[*tools])
    except (ValueError, TypeError, KeyError, RecursionError):
        # no JSON, nested too deep, not as the template wants it
        return plain
    if not is_shallow(parsed):
        return plain
    calls = _calls(parsed.get("tool_calls") or (), first)
    content = parsed.get("content", "")
    thinking = parsed.get("thinking")
    if calls is None or not isinstance(content, str) or not (calls or thinking):
        return plain
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if isinstance(thinking, str):
        message["reasoning_content"] = thinking
    if calls:
        return {**message, "tool_calls": calls}
    return message


def _calls(parsed: Sequence[Any], first: int) -> list[dict[str, Any]] | None:
    """Return the tool calls of a parsed message; None where one has no name."""
    calls = list[dict[str, Any]]()
    for number, call in enumerate(parsed, first):
        match call:
            case {"function": {"name": str(name), **rest}}:
                given = rest.get("arguments", {})
                function = {
                    "name": name,
                    "arguments": arguments_of(given) if isinstance(given, str) else given,
                }
                calls.append({"id": f"call_{number}", "type": "function", "function": function})
            case _:
                return None
    return calls
