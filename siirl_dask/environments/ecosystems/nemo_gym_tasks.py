"""Tasks of NeMo Gym, behind its resources servers:
``nemo_gym:blackjack?url=http://127.0.0.1:8000``.

A server with ``/reset`` and ``/step`` (its ``GymnasiumServer``) is played turn by turn; one with
``/verify`` rewards a single turn. Rows are those of the server's JSON lines, each with its ``entry``,
all of the line, which every request repeats as NeMo Gym's own agents do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import fsspec

from siirl_dask.environments.ecosystems.environment_servers import (
    URL,
    JsonSession,
    ask,
    numbers_of,
    url_of,
)
from siirl_dask.environments.ecosystems.observations import observed, opening_after
from siirl_dask.environments.protocol import Failure, Message, Opening, Step
from siirl_dask.errors import PlanError, clause, did_you_mean
from siirl_dask.planner.spec.ecosystems import EcosystemName

ROWS = None
"""A file has as many rows as it has."""
_FILE = "rows"
_ENTRY = "entry"
_ASKED = "responses_create_params"
_LONGEST_LINE = 32 * 2**20  # characters


def environment(name: EcosystemName) -> Callable[..., Any]:
    """Return ``NemoGymTask`` with the options of ``name``. PlanError where no server of NeMo Gym
    is at its ``url``.
    """
    _check_options(name)
    described = ask(name, "/openapi.json")
    paths = {}
    if isinstance(described, dict):
        paths = described.get("paths", {})
    if "/step" in paths and "/reset" in paths:
        return partial(NemoGymTask, url=url_of(name), begin="/reset", answer="/step")
    if "/verify" in paths:
        begin = None
        if "/seed_session" in paths:
            begin = "/seed_session"
        return partial(NemoGymTask, url=url_of(name), begin=begin, answer="/verify")
    raise PlanError(
        f"{name.spelled!r}: the server has neither /step nor /verify (it has: {sorted(paths)}): "
        "expected a resources server of NeMo Gym"
    )


def rows(name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the file that ``rows`` names, in another order with a ``seed`` other than
    0. PlanError for a file that is not in NeMo Gym's form, and for tasks with tools.
    """
    _check_options(name)
    if _FILE not in name.options:
        raise PlanError(
            f"{name.spelled!r}: expected {_FILE}=FILE.jsonl, the tasks of the server, as in "
            f"{name.package}:{name.id}?{_FILE}=data/example.jsonl"
        )
    path = str(name.options[_FILE])
    lines = _lines(path)
    if seed != 0:
        shuffled = [*lines]
        random.Random(seed).shuffle(shuffled)
        lines = iter(shuffled)
    for number, line in lines:
        where = f"{path}, line {number}"
        entry = _entry_of(line, where)
        asked = entry[_ASKED]
        if asked.get("tools"):
            raise PlanError(
                f"{where} has tools, which a server calls for an agent: expected tasks of messages "
                "alone; docs/endpoint.md trains what calls tools by an API"
            )
        answer = entry.get("expected_answer", entry.get("answer"))
        yield {
            "prompt": _messages(asked, where),
            "answer": answer if isinstance(answer, str) else json.dumps(answer),
            _ENTRY: json.dumps(entry),
        }


def _check_options(name: EcosystemName) -> None:
    known = (URL, _FILE)
    unknown = [key for key in name.options if key not in known]
    if unknown:
        raise PlanError(
            f"{name.spelled!r}: unknown option {unknown[0]!r}; expected one of {[*known]}"
            f"{did_you_mean(unknown[0], known)}"
        )


def _lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            number = 1
            while line := file.readline(_LONGEST_LINE):
                if line.strip():
                    yield number, line
                number += 1
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path!r}: {clause(error)}: expected a file of JSON lines") from error


def _entry_of(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise PlanError(f"{where}: {clause(error)}: expected a JSON object") from error
    if not isinstance(entry, dict) or not isinstance(entry.get(_ASKED), dict):
        raise PlanError(f"{where}: expected a JSON object with {_ASKED}")
    return entry


def _messages(asked: Mapping[str, Any], where: str) -> list[Message]:
    """Return what a model is asked with, as chat messages. PlanError for images and other items."""
    given = asked.get("input")
    items = given
    if isinstance(given, str):
        items = [{"role": "user", "content": given}]
    if not isinstance(items, list) or not items:
        raise PlanError(f"{where}: {_ASKED}.input={given!r}: expected a text or messages")
    instructions = asked.get("instructions")
    messages = []
    if instructions:
        messages = [{"role": "system", "content": instructions}]
    return [*messages, *(_message(item, where) for item in items)]


def _message(item: Any, where: str) -> Message:
    content = None
    if isinstance(item, dict):
        content = item.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        only_texts = [text for text in texts if isinstance(text, str)]
        content = None
        if len(only_texts) == len(texts):
            content = "".join(only_texts)
    if not isinstance(content, str) or not isinstance(item.get("role"), str):
        raise PlanError(f"{where}: {_ASKED}.input has {item!r:.200}: expected messages of text")
    return {"role": item["role"], "content": content}


class NemoGymTask:
    """A task of a resources server, in the protocol of this package."""

    def __init__(self, *, url: str, begin: str | None, answer: str) -> None:
        """``begin`` is the path that begins a session, None without one; ``answer`` the path that
        takes a turn: ``/step``, or ``/verify``, with which the task ends.
        """
        self._session = JsonSession(url)
        self._begin = begin
        self._answer = answer
        self._row: Mapping[str, Any] = {}
        self._entry: Mapping[str, Any] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | Failure:
        """Begin the task of the row's ``entry``. An observation follows the row's prompt."""
        if _ENTRY not in row:
            return Failure("the row has no entry: environments.columns=[prompt, entry]")
        self._row = row
        self._entry = json.loads(row[_ENTRY])
        if self._begin is None:
            return Opening()
        answer = await self._session.post(self._begin, self._entry)
        if isinstance(answer, Failure):
            return answer
        text = answer.get("observation")
        if not text:
            return Opening()
        prompt = row.get("prompt")
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            return Opening(prompt=[*prompt, {"role": "user", "content": str(text)}])
        return opening_after(row, str(text))

    async def step(self, text: str) -> Step | Failure:
        """Give the turn to the server. Return its observation and reward."""
        body = {**self._entry, "response": _response(text)}
        answer = await self._session.post(self._answer, body)
        if isinstance(answer, Failure):
            return answer
        reward = answer.get("reward")
        if not isinstance(reward, (int, float)):
            return Failure(f"{self._answer} gave the reward {reward!r}: expected a number")
        if self._answer == "/verify":
            known = {"reward", *self._entry}
            parts = numbers_of({key: value for key, value in answer.items() if key not in known})
            return Step(reward=float(reward), done=True, parts=parts)
        observation = answer.get("observation")
        return Step(
            observation=observed(self._row, str(observation)) if observation else None,
            reward=float(reward),
            done=bool(answer.get("terminated") or answer.get("truncated")),
        )

    def close(self) -> None:
        """End the connection."""
        self._session.close()


def _response(text: str) -> dict[str, Any]:
    """Return a turn as an answer of the Responses API, which resources servers read."""
    return {
        "id": "response",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "output": [
            {
                "id": "message",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }
        ],
    }
