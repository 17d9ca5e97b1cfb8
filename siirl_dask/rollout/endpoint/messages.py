"""Chat messages as the chat template reads them, and as two of them are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from siirl_dask.rollout.endpoint.refusals import invalid, over_limit

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of requests, and those that chat templates know."""
_MOST_TOOLS = 256
_DEEPEST = 64


def read_messages(messages: object, most: int) -> list[dict[str, Any]]:
    """Return messages for the chat template: contents are texts, arguments of tool calls objects.

    Refusal for anything else, and for more than ``most``.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", messages, "a list of at least one message")
    if len(messages) > most:
        raise over_limit(f"messages: {len(messages)}, more than {most} (endpoint.max_messages)")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def read_tools(tools: object) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools for the chat template. Refusal for anything else."""
    if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
        raise invalid("tools", tools, f"a list of at most {_MOST_TOOLS} functions")
    for at, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                pass
            case _:
                raise invalid(
                    f"tools[{at}]",
                    tool,
                    "an object with type 'function' and a function that has a name",
                )
    return tools


def digest(message: Mapping[str, Any]) -> str:
    """Return what two messages have in common that say the same: role, text, and the tools that
    they call.

    Clients may send a call's arguments with other white space, and leave out what was thought
    before an answer.
    """
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return json.dumps(
        [message["role"], message["content"], message.get("name"), calls], sort_keys=True
    )


def _message(message: object, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str) or role not in _ROLES:
        raise invalid(where, message, f"an object with a role, one of {[*_ROLES]}")
    read: dict[str, Any] = {
        "role": _ROLES[role],
        "content": _content(message.get("content"), where),
    }
    if message.get("tool_calls"):
        read["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise invalid(f"{where}.{name}", value, "a text")
            read[name] = value
    return read


def _content(content: object, where: str) -> str:
    """Return a content as one text; a list holds parts of it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}.content", content, "a text, or a list of parts of type text")
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type") == "text"
    ]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise invalid(f"{where}.content", content, "parts of type text: the model reads no other")
    return "".join(text for text in texts if isinstance(text, str))


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as chat templates print them."""
    read = list[dict[str, Any]]()
    for call in calls if isinstance(calls, list) else [calls]:
        match call:
            case {"function": {"name": str(name), "arguments": str(text)}, **rest}:
                named = {"id": rest["id"]} if isinstance(rest.get("id"), str) else {}
                read.append(
                    {
                        **named,
                        "type": "function",
                        "function": {"name": name, "arguments": arguments_of(text)},
                    }
                )
            case _:
                raise invalid(
                    where, calls, "a list of objects, each with a function's name and arguments"
                )
    return read


def arguments_of(text: str) -> Any:
    """Return a call's arguments, JSON as a text, as an object; the text where it is no JSON, or
    nested too deep.
    """
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if is_shallow(arguments) else text


def is_shallow(value: Any) -> bool:
    """Return whether JSON is nested at most 64 deep, so that templates and encoders, which
    recurse, can write it.
    """
    level = [value]
    for _ in range(_DEEPEST):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return True
        level = []
        for each in containers:
            level.extend(each.values() if isinstance(each, dict) else each)
    return not any(isinstance(item, dict | list) for item in level)
