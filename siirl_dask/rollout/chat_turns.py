"""Continues chats token by token: the ids that a chat template puts between a sampled turn and the
next one.

A sampled turn is never rendered: decoding and encoding it again may give other ids, and templates
rewrite earlier turns (Qwen3's and DeepSeek-R1's take their thoughts out). So a conversation is
rendered with a sentinel in place of the turn, and what follows the sentinel is what the new
messages add to the ids that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from siirl_dask.errors import ConfigError
from siirl_dask.rollout.message_forms import MessageForms

if TYPE_CHECKING:  # scripts import this with run, before broken packages are hidden
    from transformers import PreTrainedTokenizerBase

_SENTINELS = ("siirlsentinelturn", "anothersentinelturn")
_PROBE = "siirlprobemessage"
Messages = Sequence[Mapping[str, Any]]


def _unused(*given: Sequence[Mapping[str, Any]]) -> str:
    """Return a word that none of the messages and tools has: a page that a tool returns may hold
    any.
    """
    texts = repr(given)
    word = _SENTINELS[0]
    number = 0
    while word in texts:
        number += 1
        word = f"{_SENTINELS[0]}{number}x"
    return word


class ChatTurns:
    """Continues conversations of one tokenizer. ConfigError when made for a chat template that
    cannot be continued.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """``template`` holds keyword arguments of the chat template."""
        self._tokenizer = tokenizer
        self._path = path
        self._template = dict(template or {})
        self._forms = MessageForms(tokenizer, path, self._template)
        self._check()

    def after_turn(
        self,
        before: Messages,
        new: Messages,
        tools: Sequence[Mapping[str, Any]],
        last: int,
    ) -> list[int]:
        """Return the ids between a sampled turn and the policy's next one, in which the ``new``
        messages stand.

        ``before`` are the messages that the conversation began with. ``last`` is the last id that
        was sampled: where it is the end of turn that the template writes, that is not repeated.
        ConfigError where the template fails.
        """
        rest = self._rendered(before, _unused(before, new, tools), new, tools)
        ids = list(self._tokenizer(rest, add_special_tokens=False)["input_ids"])
        if last in ids:
            end = ids.index(last)
            if not str(
                self._tokenizer.decode(ids[:end])
            ).strip():  # a template may put white space before the end of turn
                return ids[end + 1 :]
        return ids

    def _rendered(
        self,
        before: Messages,
        turn: str,
        new: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return what the template writes after an assistant's ``turn``, up to where it answers
        the new messages.
        """
        chat = self._forms.prepared([*before, {"role": "assistant", "content": turn}, *new])
        given: list[Any] | None = [*map(dict, tools)] or None
        try:
            text: Any = self._tokenizer.apply_chat_template(
                chat, tools=given, add_generation_prompt=True, tokenize=False, **self._template
            )
        except Exception as error:  # a template raises what it likes
            raise self._refused(
                f"fails on a conversation of several turns: {type(error).__name__}: {error}"
            ) from error
        if text.count(turn) != 1:
            raise self._refused(
                f"writes an assistant's turn {text.count(turn)} times: expected once"
            )
        return str(text.partition(turn)[2])

    def _check(self) -> None:
        """Raise ConfigError unless what the template writes after a turn holds the new message,
        whatever the turn.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.path={self._path!r}: its tokenizer has no chat template, and an "
                "environment talks in messages; "
                "expected a chat model, or prompts and observations that are strings"
            )
        before = [{"role": "user", "content": "a"}]
        new = [{"role": "user", "content": _PROBE}]
        first, second = (self._rendered(before, turn, new) for turn in _SENTINELS)
        if _PROBE not in first:
            raise self._refused("writes a new message before the turn that it answers")
        if first != second:
            raise self._refused("writes other text after a turn for other words in it")

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"model.path={self._path!r}: its chat template {reason}; a conversation cannot be "
            "continued token by "
            "token: take another template, or prompts and observations that are strings"
        )
