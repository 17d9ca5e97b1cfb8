"""Tells who said what in a conversation, from its tokens: the policy, with its tool calls, or an
environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from siirl_dask.schema import (
    AGENT,
    FINISH_REASON,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    TURNS,
)

FAILED = "failed"
"""The finish reason of an episode in which a call of its environment failed."""
POLICY = "policy"
ENVIRONMENT = "environment"
TOOL = "tool"
Decode: TypeAlias = Callable[[Sequence[int], bool], str]
"""``decode(ids, special)``: the text of tokens, with the special ones among them or without."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*(?:</tool_response>|$)", re.DOTALL)
_MESSAGES = (  # as the chat templates of most models write them: ChatML, Llama 3, Gemma
    re.compile(r"<\|im_start\|>(\w+)\n?(.*?)(?:<\|im_end\|>|$)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*(.*?)(?:<\|eot_id\|>|$)", re.DOTALL
    ),
    re.compile(r"<start_of_turn>(\w+)\n?(.*?)(?:<end_of_turn>|$)", re.DOTALL),
)
_MARKS = re.compile(r"<\|\w+\|>|</?(?:start|end)_of_turn>|</s>")
_ASSISTANT = ("assistant", "model")
# what a template puts before the policy's next turn
_OPENINGS = ("", "<think>", "<think>\n\n</think>")


class UtteranceKind(StrEnum):
    """Kinds of utterances."""

    SAID = "said"
    CALL = "call"
    """The policy calls a tool."""
    ANSWER = "answer"
    """The environment speaks."""
    RESULT = "result"
    """A tool's answer."""
    SEGMENT = "segment"
    """The history is rewritten: the text is the new one."""
    FAILURE = "failure"
    """A call of the environment failed, and the episode with it."""


@dataclass(frozen=True, slots=True)
class WrittenSpan:
    """Neighbouring tokens of a response that one side wrote."""

    start: int
    stop: int
    own: bool
    """True where the policy wrote them."""
    reward: float | None = None
    """Reward of the turn, where the row tells it."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One thing that was said in a conversation."""

    who: str
    kind: UtteranceKind
    text: str
    turn: int | None = None
    """Number of the policy's turn, from 1."""
    reward: float | None = None


def spans_of(
    tokens: int, mask: Sequence[bool] | None, turns: Sequence[Mapping[str, Any]] | None
) -> list[WrittenSpan]:
    """Return the spans of a response of so many tokens, which they cover in their order.

    The policy's are its ``turns``; without them, what ``mask`` marks; without a mask, all.
    """
    if turns:
        own = [
            WrittenSpan(int(turn["start"]), int(turn["stop"]), True, turn.get("reward"))
            for turn in turns
        ]
    elif mask is not None:
        own = list(_marked(mask))
    else:
        own = [WrittenSpan(0, tokens, True)]
    spans = []
    at = 0
    for span in sorted(own, key=lambda one: one.start):
        start = max(at, span.start)
        stop = min(tokens, span.stop)
        if start >= stop:
            continue
        spans += [WrittenSpan(at, start, False)] if at < start else []
        spans.append(WrittenSpan(start, stop, True, span.reward))
        at = stop
    if at < tokens:
        return [*spans, WrittenSpan(at, tokens, False)]
    return spans


def _marked(mask: Sequence[bool]) -> Iterator[WrittenSpan]:
    begin = None
    for at, marked in enumerate([*mask, False]):
        if marked and begin is None:
            begin = at
        elif not marked and begin is not None:
            yield WrittenSpan(begin, at, True)
            begin = None


def utterances(rows: Sequence[Mapping[str, Any]], decode: Decode | None) -> list[Utterance]:
    """Return what was said in an episode, of whose rows the columns are given in the order of their
    ids.

    Without ``decode``, or where a row has no ids, its response is told as a whole.
    """
    utterances: list[Utterance] = []
    turn = 0
    for number, row in enumerate(rows):
        who = POLICY
        if row.get(AGENT):
            who = row[AGENT]
        if number:
            utterances.append(
                Utterance(
                    f"segment {number + 1}, a new history",
                    UtteranceKind.SEGMENT,
                    _prompt(row, decode),
                )
            )
        ids = row.get(RESPONSE_IDS)
        if decode is None or not ids:
            turn += len(row.get(TURNS) or ())
            utterances.append(
                Utterance(who, UtteranceKind.SAID, row.get(RESPONSE) or "", None, row.get(REWARD))
            )
            continue
        for span in spans_of(len(ids), row.get(RESPONSE_MASK), row.get(TURNS)):
            if span.own:
                turn += 1
                utterances += said(
                    who, decode(ids[span.start : span.stop], False), turn, span.reward
                )
            else:
                utterances += answered(decode(ids[span.start : span.stop], True))
    if rows and rows[-1].get(FINISH_REASON) == FAILED:
        utterances.append(
            Utterance(
                ENVIRONMENT,
                UtteranceKind.FAILURE,
                "a call of the environment failed: the episode has no reward",
            )
        )
    return utterances


def _prompt(row: Mapping[str, Any], decode: Decode | None) -> str:
    ids = row.get(PROMPT_IDS)
    if decode is not None and ids:
        return decode(ids, True)
    return ""


def said(who: str, text: str, turn: int, reward: float | None) -> list[Utterance]:
    """Return a turn of the policy: its text and its tool calls, the last of which has the
    reward.
    """
    parts = []
    for part, is_call in _split(_CALL, text.strip()):
        if is_call:
            parts.append(Utterance(who, UtteranceKind.CALL, call(part), turn))
        else:
            parts.append(Utterance(who, UtteranceKind.SAID, part, turn))
    if not parts:
        parts.append(Utterance(who, UtteranceKind.SAID, "", turn))
    last = parts[-1]
    return [*parts[:-1], Utterance(last.who, last.kind, last.text, turn, reward)]


def answered(text: str) -> list[Utterance]:
    """Return what an environment answered: the messages that a chat template has put between
    turns, or the text.
    """
    for pattern in _MESSAGES:
        if pattern.search(text):
            found = [(role or ENVIRONMENT, content) for content, role in _messages(pattern, text)]
            break
    else:
        found = [(ENVIRONMENT, text)]
    utterances = []
    for role, content in found:
        content = _MARKS.sub("", content).strip()
        if role in _ASSISTANT and content in _OPENINGS:
            continue
        for part, is_result in _split(_RESULT, content):
            if is_result or role in (TOOL, "ipython"):
                utterances.append(Utterance(TOOL, UtteranceKind.RESULT, part))
            else:
                utterances.append(
                    Utterance(ENVIRONMENT if role == "user" else role, UtteranceKind.ANSWER, part)
                )
    return utterances


def _messages(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """Yield content and role of the messages, and with an empty role what is not in any."""
    at = 0
    for match in pattern.finditer(text):
        yield text[at : match.start()], ""
        yield match[2], match[1]
        at = match.end()
    yield text[at:], ""


def _split(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text that are not empty, with whether the pattern, whose group is
    yielded, matches them.
    """
    at = 0
    for match in pattern.finditer(text):
        before = text[at : match.start()].strip()
        if before:
            yield before, False
        yield match[1], True
        at = match.end()
    rest = text[at:].strip()
    if rest:
        yield rest, False


def call(text: str) -> str:
    """Return a tool call as ``name(argument=value)``; as it is, where it is none."""
    try:
        parsed = json.loads(text)
        name = parsed["name"]
        arguments = parsed.get("arguments", {})
        return (
            f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text
