"""Tools: their JSON schemas, the calls in what a model wrote, and the check of a call's arguments.

Calls are read by the tokenizer's ``parse_response`` where it has a response template (transformers
5), else in the form of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments":
{...}}</tool_call>``, as often as the model likes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from siirl_dask.environments.protocol import Action, Message, Text
from siirl_dask.errors import ConfigError, clause
from siirl_dask.wording import without_addresses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = Mapping[str, Any]
"""A JSON schema as chat templates read it: ``{"type": "function", "function": {"name",
"description", ...}}``."""

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_SHOWN = 200  # characters of a model's text in an error


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool that the model wrote."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something that was meant as a call and cannot be read as one."""

    reason: str
    """A text for the model."""


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the JSON schema of a typed function with a docstring in Google's style; ``self`` is
    left out.

    ConfigError, naming the function, for one without types or descriptions.
    """
    # takes seconds to import: only where there are tools
    from transformers.utils.chat_template_utils import get_json_schema

    bound = {}
    bare = function
    if isinstance(function, partial):
        bound = function.keywords
        bare = function.func
    name = getattr(bare, "__name__", repr(bare))
    try:
        schema: dict[str, Any] = get_json_schema(bare)
    except Exception as error:
        # transformers raises exceptions of its own, which have no common base
        raise ConfigError(
            f"the tool {name!r} has no schema: {clause(error)}; expected types on all arguments and a "
            "docstring with a line for each under 'Args:'"
        ) from error
    parameters = schema["function"]["parameters"]
    for known in bound:
        parameters["properties"].pop(known, None)
    if "required" in parameters:
        parameters["required"] = [known for known in parameters["required"] if known not in bound]
    return schema


def schemas_by_name(tools: Sequence[Schema]) -> dict[str, Schema]:
    """Return schemas by the names of their tools. ConfigError for two of one name."""
    named: dict[str, Schema] = {}
    for schema in tools:
        name = schema["function"]["name"]
        if name in named:
            raise ConfigError(f"two tools are named {name!r}: rename one of them")
        named[name] = schema
    return named


class CallParser:
    """Finds the calls of tools in a turn. ``tokenizer`` is the model's; without one, only
    Hermes's form is known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """``template`` holds keyword arguments of the chat template."""
        self._tokenizer = tokenizer
        self._arguments = dict(template or {})
        self._template = getattr(tokenizer, "response_template", None)

    def calls(self, action: Action, tools: Mapping[str, Schema]) -> list[Call | Malformed]:
        """Return the calls of a turn in order, checked against the tools' schemas; none for an
        answer.
        """
        found = (
            self._from_hermes(action)
            if self._template is None
            else self._from_template(action, tools)
        )
        return [checked(call, tools) if isinstance(call, Call) else call for call in found]

    def _from_template(self, action: Action, tools: Mapping[str, Schema]) -> list[Call | Malformed]:
        assert self._tokenizer is not None
        try:
            parsed: Any = self._tokenizer.parse_response(
                list(action.token_ids),
                prefix=self._prefix(),
                tools=[dict(schema) for schema in tools.values()],
            )
        except Exception as error:
            # of json, of a regular expression, of a missing field: what a model wrote is wrong
            return [Malformed(f"the call cannot be read: {without_addresses(str(error))[:_SHOWN]}")]
        return [_call_of(call.get("function", call)) for call in parsed.get("tool_calls") or ()]

    def _prefix(self) -> str:
        """Return a prompt that ends as every prompt does: templates may begin the model's
        message there.
        """
        assert self._tokenizer is not None
        return str(
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}],
                add_generation_prompt=True,
                tokenize=False,
                **self._arguments,
            )
        )

    def _from_hermes(self, action: Action) -> list[Call | Malformed]:
        text = action.text
        # for some the marks are special tokens, which the text is without
        if self._tokenizer is not None:
            text = str(self._tokenizer.decode(list(action.token_ids), skip_special_tokens=False))
        return [_hermes(body, closed=bool(end)) for body, end in _HERMES.findall(text)]


def _hermes(body: str, *, closed: bool) -> Call | Malformed:
    if not closed:
        return Malformed("the call is not closed: expected </tool_call> after it")
    try:
        return _call_of(json.loads(body))
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is not JSON ({error}): {body.strip()[:_SHOWN]}")


def _call_of(plain: object) -> Call | Malformed:
    arguments = None
    name = None
    if isinstance(plain, Mapping):
        arguments = plain.get("arguments", plain.get("parameters", {}))
        name = plain.get("name")
    if isinstance(arguments, str):  # as in OpenAI's API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return Malformed('expected {"name": "...", "arguments": {...}}')
    return Call(name, arguments)


def checked(call: Call, tools: Mapping[str, Schema]) -> Call | Malformed:
    """Return the call if its tool is there and takes these arguments; else a text that says what
    was expected.
    """
    if call.name not in tools:
        return Malformed(f"there is no tool {call.name[:_SHOWN]!r}; tools: {', '.join(tools)}")
    parameters = tools[call.name]["function"].get("parameters")
    if not parameters:
        parameters = {}
    known = parameters.get("properties")
    if not known:
        known = {}
    missing = [name for name in parameters.get("required") or () if name not in call.arguments]
    if missing:
        return Malformed(f"{call.name} needs {', '.join(missing)}")
    arguments = {}
    for name, value in call.arguments.items():
        if name not in known:
            return Malformed(
                f"{call.name} takes no {name[:_SHOWN]}; it takes {', '.join(known) or 'nothing'}"
            )
        kind = known[name].get("type")
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _fits(value, kind, known[name]):
            return Malformed(
                f"{call.name}: {name} is {json.dumps(value)[:_SHOWN]}, expected {kind}"
            )
        arguments[name] = value
    return Call(call.name, arguments)


def _fits(value: object, kind: object, schema: Schema) -> bool:
    """Return whether a value is of a schema's type; of several types, or of none, it is the
    tool's to say.
    """
    if (
        (value is None and schema.get("nullable"))
        or not isinstance(kind, str)
        or kind not in _TYPES
    ):
        return True
    if isinstance(value, bool):  # which Python takes for an integer as well
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def observation_of(results: Sequence[tuple[str, str]], *, chat: bool) -> Text:
    """Return the results of a turn's calls, by the names of their tools: messages in a chat,
    else one text.
    """
    if chat:
        return [message_of(name, text) for name, text in results]
    return "".join(f"\n<tool_response>\n{text}\n</tool_response>\n" for _, text in results)


def message_of(name: str, text: str) -> Message:
    """Return the chat message with a tool's result."""
    return {"role": "tool", "name": name, "content": text}
