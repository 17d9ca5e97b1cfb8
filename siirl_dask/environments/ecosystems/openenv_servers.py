"""Environments of OpenEnv, behind their servers: ``openenv:echo_env?url=http://127.0.0.1:8000``.

The server describes its actions. One with a single field of text takes the turn as it is, one with a
single whole number the last number of the turn, and any other an object of JSON, which is then all of
the turn. ``observation`` and ``action`` name functions in place of these: ``observation(fields)``
returns the text that the policy sees, and ``action(text, fields)``, with the fields of the last
observation, an action, or None for a turn that has none. Other options are those of the environment's
``reset``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from siirl_dask.environments.answers import text_of
from siirl_dask.environments.ecosystems.environment_servers import (
    LARGEST,
    SECONDS,
    URL,
    ask,
    object_of,
    url_of,
)
from siirl_dask.environments.ecosystems.observations import observed, opening_after, seed_of
from siirl_dask.environments.protocol import Failure, Lost, Opening, Step
from siirl_dask.errors import PlanError
from siirl_dask.planner import resolve
from siirl_dask.planner.spec.ecosystems import EcosystemName, unknown_id

if TYPE_CHECKING:
    from tornado.websocket import WebSocketClientConnection

ROWS = 500
_FUNCTIONS = ("observation", "action")
_SPLIT = "split"
_INDEX = "index"
_NO_FIELDS = ("done", "reward", "metadata")
"""Every observation of OpenEnv has these, and fields of its own."""
_NUMBER = re.compile(r"[+-]?\d+")
_MOST_DIGITS = 18  # Python refuses to read thousands of them
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_PATIENCE = 60.0
"""Seconds that an episode waits for one of the server's sessions."""


def environment(name: EcosystemName) -> Callable[..., Any]:
    """Return ``OpenEnvEpisode`` with the options of ``name``. PlanError where no server of OpenEnv
    is at its ``url``, or has another environment.
    """
    functions = {part: resolve(name.options[part]) for part in _FUNCTIONS if part in name.options}
    action = _described(name)
    return partial(
        OpenEnvEpisode, url=url_of(name), schema=action, options=_of_reset(name), **functions
    )


def rows(name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the tasks of ``split``, each with its ``index``, or without a split rows with seeds one
    after the other. The prompt says how to act.
    """
    wanted = _wanted(_described(name))
    prompt = f"You act in {name.id}. {wanted}\n"
    if _SPLIT not in name.options:
        while True:
            yield {"prompt": prompt, "seed": seed}
            seed += 1
    found = ask(name, f"/{name.id}/num_tasks", {_SPLIT: name.options[_SPLIT]})
    count = None
    if isinstance(found, dict):
        count = found.get("num_tasks")
    if not isinstance(count, int):
        raise PlanError(
            f"{name.spelled!r}: the environment lists no tasks of "
            f"{_SPLIT}={name.options[_SPLIT]!r}: expected a name without {_SPLIT}"
        )
    for index in range(count):
        yield {"prompt": prompt, _INDEX: index, "seed": seed}


def _of_reset(name: EcosystemName) -> dict[str, Any]:
    no = (URL, *_FUNCTIONS)
    return {key: value for key, value in name.options.items() if key not in no}


def _described(name: EcosystemName) -> dict[str, Any]:
    """Return the JSON schema of the actions that the server of ``name`` takes."""
    listed = ask(name, "/list_environments")
    if isinstance(listed, list) and name.id.lower() not in [str(one).lower() for one in listed]:
        raise unknown_id(name, {str(one): None for one in listed})
    schemas = ask(name, "/schema")
    action = None
    if isinstance(schemas, dict):
        action = schemas.get("action")
    if not isinstance(action, dict):
        raise PlanError(
            f"{name.spelled!r}: {url_of(name)}/schema does not describe actions: expected a server "
            "of OpenEnv"
        )
    return action


def _only_field(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name and type of an action's field that alone must be there, a text or a whole
    number; None for other actions.
    """
    fields = {
        key: value
        for key, value in schema.get("properties", {}).items()
        if key not in _NO_FIELDS and isinstance(value, dict)
    }
    required = [key for key in schema.get("required", ()) if key in fields]
    chosen = required if len(fields) > 1 else [*fields]
    if len(chosen) != 1:
        return None
    kind = fields[chosen[0]].get("type")
    if kind in ("string", "integer"):
        return (chosen[0], kind)
    return None


def _wanted(schema: Mapping[str, Any]) -> str:
    """Return a sentence that says what a turn is."""
    field = _only_field(schema)
    if field is None:
        fields = [key for key in schema.get("properties", {}) if key not in _NO_FIELDS]
        return f"Write a JSON object with {', '.join(fields)} each turn."
    if field[1] == "integer":
        return f"Write a whole number, the {field[0]}, each turn."
    return f"Write the {field[0]} each turn."


class OpenEnvEpisode:
    """A session with a server of OpenEnv, in the protocol of this package."""

    def __init__(
        self,
        *,
        url: str,
        schema: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        observation: Callable[..., Any] | None = None,
        action: Callable[..., Any] | None = None,
    ) -> None:
        """``schema`` is that of actions, ``options`` are those of ``reset``; the functions are
        described above.
        """
        self._url = f"ws{url.removeprefix('http')}/ws"
        self._schema = schema
        self._options = {}
        if options is not None:
            self._options = dict(options)
        self._observation = observation
        self._action = action
        self._connection: WebSocketClientConnection | None = None
        self._row: Mapping[str, Any] = {}
        self._fields: Mapping[str, Any] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | Failure:
        """Begin a session. Return the row's prompt with the first observation after it."""
        self._row = row
        data = {**self._options, "seed": seed_of(row, seed)}
        if _INDEX in row:
            data[_INDEX] = row[_INDEX]
        answer = await self._begun({"type": "reset", "data": data})
        if isinstance(answer, Failure):
            return answer
        return opening_after(row, self._shown(answer))

    async def step(self, text: str) -> Step | Failure:
        """Act as the turn says; a turn that is no action is answered by what was expected."""
        action = self._action_in(text)
        if action is None:
            return Step(observation=observed(self._row, _wanted(self._schema)))
        answer = await self._answered({"type": "step", "data": action})
        if isinstance(answer, Failure):
            return answer
        if _code(answer) == "VALIDATION_ERROR":
            return Step(observation=observed(self._row, _wanted(self._schema)))
        if answer["type"] == "error":
            return _failed(answer)
        data = answer["data"]
        reward = data.get("reward")
        return Step(
            observation=observed(self._row, self._shown(answer)),
            reward=0.0 if reward is None else float(reward),
            done=bool(data.get("done")),
        )

    async def close(self) -> None:
        """End the session, and with it its environment."""
        if self._connection is not None:
            self._connection.close()

    async def _begun(self, message: Mapping[str, Any]) -> Mapping[str, Any] | Failure:
        """Connect and return the answer to the first message: it waits while all of the server's
        sessions are taken.
        """
        from tornado.httpclient import HTTPError
        from tornado.websocket import WebSocketError, websocket_connect

        pause = _FIRST_PAUSE
        waited = 0.0
        while True:
            connecting = asyncio.ensure_future(
                websocket_connect(self._url, connect_timeout=SECONDS, max_message_size=LARGEST)
            )
            try:
                self._connection = await asyncio.shield(connecting)
            except asyncio.CancelledError:
                # the server may open the session all the same, which nobody would end
                connecting.add_done_callback(_close_connection)
                raise
            except (OSError, HTTPError, WebSocketError) as error:
                return Lost(f"{self._url} does not open a session: {type(error).__name__}")
            answer = await self._answered(message)
            if isinstance(answer, Failure):
                return answer
            if answer["type"] != "error":
                return answer
            self._connection.close()
            if _code(answer) != "CAPACITY_REACHED":
                return _failed(answer)
            if waited >= _PATIENCE:
                return Failure(
                    f"{self._url} had no session for {_PATIENCE:g} s: start it with more "
                    "(max_concurrent_envs), or set environments.max_open to its number for a worker"
                )
            await asyncio.sleep(pause)
            waited += pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _answered(self, message: Mapping[str, Any]) -> Mapping[str, Any] | Failure:
        """Send a message. Return the server's, with its ``type`` and the object ``data``."""
        from tornado.websocket import WebSocketClosedError

        assert self._connection is not None
        # a server without a free session says so before it is asked, and closes
        with suppress(WebSocketClosedError):
            await self._connection.write_message(json.dumps(message))
        async with asyncio.timeout(SECONDS):
            text = await self._connection.read_message()
        if text is None:
            return Lost(f"{self._url} ended the session")
        answer = object_of(text, self._url)
        if not isinstance(answer.get("type"), str) or not isinstance(answer.get("data"), dict):
            return Failure(f"{self._url} sent {text!r:.200}: expected a type and data")
        return answer

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """Return the text of an observation, whose fields an ``action`` function gets."""
        found = answer["data"].get("observation")
        fields = {}
        if isinstance(found, dict):
            fields = found
        self._fields = {key: value for key, value in fields.items() if key not in _NO_FIELDS}
        if self._observation is not None:
            return str(self._observation(self._fields))
        values = [*self._fields.values()]
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return text_of(self._fields)

    def _action_in(self, text: str) -> Any:
        if self._action is not None:
            return self._action(text, self._fields)
        field = _only_field(self._schema)
        if field is None:
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                return None
            if isinstance(found, dict):
                return found
            return None
        key, kind = field
        if kind == "string":
            return {key: text}
        numbers = _NUMBER.findall(text)
        last = ""
        if numbers:
            last = numbers[-1]
        if 0 < len(last) <= _MOST_DIGITS:
            return {key: int(last)}
        return None


def _close_connection(connecting: asyncio.Future[WebSocketClientConnection]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _code(answer: Mapping[str, Any]) -> object:
    if answer["type"] == "error":
        return answer["data"].get("code")
    return None


def _failed(answer: Mapping[str, Any]) -> Failure:
    data = answer["data"]
    return Failure(f"the server says {data.get('code')}: {data.get('message')}")
