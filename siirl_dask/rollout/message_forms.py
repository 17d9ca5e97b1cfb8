"""Chat messages in the form that a model's chat template reads.

A template does not say what it reads, and raises nothing for the rest: one that expects texts prints
a list of parts as Python does, or leaves it out; one that expects parts leaves out texts; one that
expects the arguments of a tool call as an object writes a text as a string of JSON. So a template is
tried with a word of each form, and what it writes of a prompt is compared with the messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from siirl_dask.errors import DataError

if TYPE_CHECKING:  # scripts import this with run, before broken packages are hidden
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, Any]]
_PROBE = "siirlprobeword"
_ANSWER = "siirlprobeanswer"
_PRINTED = re.compile(rf"""['"]text\\?['"]\s*:\s*\\?['"]{_PROBE}""")  # a part as a list has it
_JSON_KEY = re.compile(rf'(?<!\\)"{_PROBE}"')
_WORD = re.compile(r"\w+")
_DEEPEST = 64
_SHOWN = 60  # characters of a message in an error
_ALWAYS_SPEAK = ("system", "developer", "user")  # others may only call tools, or return nothing


def without_nulls(value: Any) -> Any:
    """Return plain data without the fields of its mappings that are null, however deep they are."""
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def arguments_of(text: str) -> Any:
    """Return a call's arguments, JSON as a text, as an object; the text where it is no JSON, or
    nested too deep.
    """
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if is_shallow(arguments):
        return arguments
    return text


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


class MessageForms:
    """The forms of contents and of tool calls that one chat template reads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        template: Mapping[str, Any],
    ) -> None:
        """``template`` holds keyword arguments of the chat template; ``path`` is the model's, for
        errors.
        """
        self._tokenizer = tokenizer
        self._path = path
        self._template = dict(template)

    def prepared(self, chat: object) -> Chat:
        """Return messages as the template reads them, without fields that are null.

        A list of texts as a content becomes one text where the template reads texts alone, and a
        text such a list where it reads lists alone. Arguments of tool calls become objects, or JSON
        where the template reads texts. DataError for what is no list of messages with roles and
        contents, and for a part that the template does not read.
        """
        if not isinstance(chat, list | tuple) or not chat:
            raise DataError(
                f"its chat is {chat!r:.100}: expected a list of messages {{role: ..., content: ...}}"
            )
        return [self._message(message, number) for number, message in enumerate(chat)]

    def check_written(self, chat: Chat, text: str) -> None:
        """Raise DataError unless the template has written each message into ``text``, the prompt:
        the words of all but the assistant's, whose thoughts it may leave out, and the names of
        functions that are called.
        """
        for number, message in enumerate(chat):
            for said in _words_of(message):
                if said.strip() in text or all(word in text for word in _WORD.findall(said)):
                    continue
                raise DataError(
                    f"the chat template of {self._path!r} does not write what message {number} of "
                    f"its chat ({message['role']}) says, {said!r:.{_SHOWN}}, and the model would "
                    "not see it: take a template that does, or such messages out of the prompts, as "
                    "with data import --column 'prompt=messages[1:]'"
                )

    @property
    def unbegun_note(self) -> str:
        """Return a sentence where a prompt ends before the assistant's turn begins; empty where it
        does not, and where the template refuses a question without more.

        Such a template does not read ``add_generation_prompt``, and writes a header before answers.
        """
        question = [{"role": "user", "content": _PROBE}]
        prompt = self._tried(question)
        if prompt is None or prompt != self._tried(question, begins=False):
            return ""
        answered = self._tried([*question, {"role": "assistant", "content": _ANSWER}], begins=False)
        if answered is None or not answered.startswith(prompt.rstrip()):
            return ""
        header = answered.removeprefix(prompt.rstrip()).partition(_ANSWER)[0].strip()
        if not header:
            return ""
        return (
            f"the chat template of {self._path!r} does not begin the assistant's turn: an answer "
            f"comes after {header!r}, which no prompt ends with, so that the model has to write it "
            "itself; take a template that reads add_generation_prompt"
        )

    def _message(self, message: object, number: int) -> dict[str, Any]:
        where = f"message {number} of its chat"
        if not isinstance(message, Mapping):
            raise DataError(f"{where} is {message!r:.100}: expected {{role: ..., content: ...}}")
        read: dict[str, Any] = without_nulls(message)
        role = read.get("role")
        if not isinstance(role, str) or not role:
            raise DataError(f"{where} has the role {role!r:.100}: expected a text, such as user")
        if role in _ALWAYS_SPEAK and "content" not in read:
            raise DataError(f"{where} ({role}) has no content: expected a text")
        read["content"] = self._content(read.get("content", ""), f"{where} ({role})")
        calls = read.get("tool_calls")
        if isinstance(calls, list):
            read["tool_calls"] = [self._call(call) for call in calls]
        return read

    def _content(self, content: object, where: str) -> object:
        reads_texts, reads_parts = self._content_forms
        if isinstance(content, str):
            if reads_texts or not reads_parts:
                return content
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise DataError(
                f"{where} has the content {content!r:.100}: expected a text, or a list of parts"
            )
        if reads_parts or not reads_texts:
            return content
        return "".join(self._text_of(part, where) for part in content)

    def _text_of(self, part: object, where: str) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, dict) and part.get("type") == "text":
            text = part.get("text")
            if isinstance(text, str):
                return text
        raise DataError(
            f"{where} has the part {part!r:.100}, and the chat template of {self._path!r} reads "
            "texts alone: expected {type: text, text: ...}"
        )

    def _call(self, call: object) -> object:
        if not isinstance(call, dict):
            return call
        function = call.get("function")
        if isinstance(function, dict):
            return {**call, "function": self._with_arguments(function)}
        return self._with_arguments(call)

    def _with_arguments(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._reads_json:
            found = arguments_of(arguments)
            if isinstance(found, dict):
                return {**function, "arguments": found}
        if isinstance(arguments, dict) and self._reads_json:
            return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return function

    @cached_property
    def _content_forms(self) -> tuple[bool, bool]:
        """Whether the template writes a text, and a list of parts; neither is known where it
        refuses both.
        """
        text = self._of_content(_PROBE)
        parts = self._of_content([{"type": "text", "text": _PROBE}])
        if _PRINTED.search(parts):
            parts = ""
        return _PROBE in text, _PROBE in parts

    def _of_content(self, content: object) -> str:
        """Return what the template writes of a user's message; some want a system's before it."""
        message = {"role": "user", "content": content}
        chats: tuple[Chat, ...] = ([message], [{"role": "system", "content": "a"}, message])
        for chat in chats:
            text = self._tried(chat)
            if text is not None:
                return text
        return ""

    @cached_property
    def _reads_json(self) -> bool:
        """Whether the template wants the arguments of a tool call as JSON, and not as an object."""
        of_object = self._of_arguments({_PROBE: "b"})
        if of_object is not None and f"'{_PROBE}'" not in of_object:
            return False
        of_text = self._of_arguments(json.dumps({_PROBE: "b"}))
        if of_text is None:
            return False
        return _JSON_KEY.search(of_text) is not None

    def _of_arguments(self, arguments: object) -> str | None:
        call = {
            "type": "function",
            "id": "call00001",
            "function": {"name": "f", "arguments": arguments},
        }
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = {"role": "tool", "content": "c", "name": "f", "tool_call_id": "call00001"}
        return self._tried([{"role": "user", "content": "a"}, asks, answer])

    def _tried(self, chat: Chat, *, begins: bool = True) -> str | None:
        try:
            text: Any = self._tokenizer.apply_chat_template(
                chat, add_generation_prompt=begins, tokenize=False, **self._template
            )
        except Exception:  # a template raises what it likes at what it does not read
            return None
        return str(text)


def _words_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a prepared message that each template writes."""
    content = message.get("content")
    if message["role"] == "assistant":
        content = None
    if isinstance(content, str):
        yield content
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            yield name
