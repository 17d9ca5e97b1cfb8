"""A session: the episodes of one step on one worker, their turns, their tools, and their end
whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

from siirl_dask.environments.answers import cut
from siirl_dask.environments.event_loop import EventLoop
from siirl_dask.environments.places import EnvironmentHost
from siirl_dask.environments.protocol import (
    Action,
    Answer,
    Failure,
    Lost,
    OnAnswer,
    Opening,
    Step,
    ToolCalls,
)
from siirl_dask.environments.room import ONLY, Opened
from siirl_dask.environments.tools import Call, CallParser, Schema, observation_of, schemas_by_name
from siirl_dask.errors import ConfigError
from siirl_dask.wording import exception_text

logger = logging.getLogger("siirl_dask.environments")

PATIENCE = 5.0  # seconds for calls under way, and for close(), when a session is left
# bytes of a result for which no room is left: what the word takes that says that it was cut
_LEAST = 64


class Tally:
    """Counts calls of tools: the event loop adds, and the thread of a step takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted = ToolCalls()

    def add(self, result: str | Failure) -> None:
        """Count a call by what it gave."""
        with self._lock:
            failed = self._counted.failed
            reason = self._counted.reason
            if isinstance(result, Failure):
                failed += 1
                reason = result.reason
            self._counted = ToolCalls(self._counted.calls + 1, failed, reason)

    def take(self) -> ToolCalls:
        """Return what was counted since this was called last."""
        with self._lock:
            counted = self._counted
            self._counted = ToolCalls()
        return counted


@dataclass(frozen=True, slots=True)
class SessionRules:
    """The part of a session that is the same in every step."""

    place: EnvironmentHost
    names: Sequence[str]
    """Names of the environments: ``ONLY`` alone where there is one, none where there are tools
    alone."""
    name_column: str
    columns: Sequence[str]
    """Columns that ``reset`` gets."""
    tools: Mapping[str, Schema]
    """Tools without state, by name."""
    remote: Mapping[str, Callable[[Mapping[str, Any]], Coroutine[Any, Any, str | Failure]]]
    """Functions of tools that other servers have, by name; the others are in ``place``."""
    parser: CallParser
    max_open: int | None
    errors_are_text: bool
    """Whether the error of a tool is its result for the model, or the failure of the episode."""
    most: int
    """Bytes of an observation."""
    progress: Callable[[], None]
    tally: Tally = field(default_factory=Tally)
    keys: Iterator[int] = field(default_factory=count)
    """Numbers for the place, so that an environment that is still closing is never taken for
    another one."""


@dataclass(slots=True)
class _Episode:
    """An episode that is open, or waits to be."""

    key: int
    """Its number in the place."""
    task: asyncio.Task[None] | None = None
    """The call that is under way."""
    admitted: bool = False
    opened: Opened | None = None
    tools: Mapping[str, Schema] | None = None
    """All tools that it may call, by name."""
    chat: bool = True
    """Whether its prompt is a chat."""
    reward: float = 0.0
    """The reward that it told last."""


class WorkerSession:
    """A Session whose calls are made on ``loop``. All but the methods of the protocol belongs to
    the loop's thread.
    """

    def __init__(self, rules: SessionRules, loop: EventLoop, on_answer: OnAnswer) -> None:
        self._rules = rules
        self._loop = loop
        self._on_answer = on_answer
        self._episodes: dict[int, _Episode] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._room = None
        if rules.max_open is not None:
            self._room = asyncio.Semaphore(rules.max_open)
        self._left = False
        self._broken: BaseException | None = None

    def reset(self, episode: int, row: Mapping[str, Any], seed: int) -> None:
        """Make the episode's environment and reset it with the columns of its row. Answers
        Opening or Failure.
        """
        reset = partial(self._reset, row=row, seed=seed)
        self._loop.call_soon(partial(self._begin, episode, reset))

    def step(self, episode: int, action: Action) -> None:
        """Give the policy's turn to the environment. Answers Step or Failure."""
        step = partial(self._step, action=action)
        self._loop.call_soon(partial(self._begin, episode, step))

    def close(self, episode: int) -> None:
        """Clean the episode's environment up. It answers nothing."""
        self._loop.call_soon(partial(self._close, episode))

    def __enter__(self) -> WorkerSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close what is open, for a few seconds; then end the processes of calls that are still
        under way.
        """
        leaving = self._loop.run(self._leave())
        with suppress(FutureTimeout):  # the loop hangs in a user's coroutine that blocks it
            leaving.result(2 * PATIENCE)
        if self._broken is not None and error is None:
            raise self._broken

    def _begin(self, number: int, call: Callable[[_Episode], Coroutine[Any, Any, Answer]]) -> None:
        if self._left:
            return
        episode = self._episodes.get(number)
        if episode is None:
            episode = self._episodes[number] = _Episode(next(self._rules.keys))
        assert episode.task is None, f"episode {number} has a call under way"
        episode.task = asyncio.create_task(self._answer(number, episode, call(episode)))

    async def _answer(
        self,
        number: int,
        episode: _Episode,
        call: Coroutine[Any, Any, Answer],
    ) -> None:
        try:
            answer = await call
        except Exception as error:
            # nothing of an environment comes this way; a caller that waits must hear of it
            logger.exception("a call of episode %d", number)
            answer = Failure(exception_text(error))
        episode.task = None
        if self._left or self._episodes.get(number) is not episode:
            return
        if isinstance(answer, Failure) or (isinstance(answer, Step) and answer.done):
            self._close(number)
        self._rules.progress()
        try:
            self._on_answer(number, answer)
        except BaseException as error:  # raised where the session is left
            if self._broken is None:
                self._broken = error

    async def _reset(self, episode: _Episode, row: Mapping[str, Any], seed: int) -> Answer:
        rules = self._rules
        if self._room is not None:
            await self._room.acquire()
        episode.admitted = True
        if not rules.names:
            opened: Opened | Failure = Opened(Opening())
        else:
            name = ONLY if list(rules.names) == [ONLY] else str(row.get(rules.name_column))
            if name not in rules.names:
                return Failure(
                    f"its column {rules.name_column!r} is {name!r}: expected one of "
                    f"{list(rules.names)}"
                )
            given = {column: row[column] for column in rules.columns if column in row}
            opened = await rules.place.open(episode.key, name, given, seed)
        if isinstance(opened, Failure):
            return opened
        try:
            episode.tools = schemas_by_name([*opened.tools, *rules.tools.values()])
        except ConfigError as error:
            return Failure(str(error))
        prompt = row.get("prompt") if opened.opening.prompt is None else opened.opening.prompt
        episode.opened = opened
        episode.chat = not isinstance(prompt, str)
        return replace(opened.opening, tools=[*opened.opening.tools, *episode.tools.values()])

    async def _step(self, episode: _Episode, action: Action) -> Answer:
        opened = episode.opened
        rules = self._rules
        if opened is None or episode.tools is None:
            return Failure("is not open")
        calls = []
        if episode.tools:
            calls = rules.parser.calls(action, episode.tools)
        if not calls and opened.takes_text:
            answer: Answer = await rules.place.step(episode.key, action.text)
        elif not calls:
            answer = Step(done=True)
        else:
            answer = await self._use(episode, calls)
        if isinstance(answer, Step) and opened.gives_reward:
            return await self._rewarded(episode, answer)
        return answer

    async def _use(self, episode: _Episode, calls: Sequence[Any]) -> Step | Failure:
        """Make the calls of a turn one after the other."""
        assert episode.opened is not None
        own = {schema["function"]["name"] for schema in episode.opened.tools}
        results: list[tuple[str, str]] = []
        left = self._rules.most
        for call in calls:
            name = "error"
            result = f"error: {getattr(call, 'reason', '')}"
            if isinstance(call, Call):
                name = call.name
                given = await self._call(episode.key if call.name in own else None, call)
                self._rules.tally.add(given)
                lost = isinstance(given, Lost)
                if name in own and not self._rules.place.holds(episode.key):
                    lost = True
                if isinstance(given, Failure) and (lost or not self._rules.errors_are_text):
                    return Failure(f"its tool {name} {given.reason}")
                result = f"error: {name} {given.reason}" if isinstance(given, Failure) else given
            result = cut(result, max(left, _LEAST))
            left -= len(result.encode())
            results.append((name, result))
        return Step(observation=observation_of(results, chat=episode.chat))

    async def _call(self, key: int | None, call: Call) -> str | Failure:
        if key is None and (remote := self._rules.remote.get(call.name)) is not None:
            return await remote(call.arguments)
        return await self._rules.place.use(key, call.name, call.arguments)

    async def _rewarded(self, episode: _Episode, answer: Step) -> Answer:
        """Add to a turn's reward what ``get_reward`` has risen by: the sum over the turns is its
        last value.
        """
        reward = await self._rules.place.reward(episode.key)
        if isinstance(reward, Failure):
            return reward
        rise = reward - episode.reward
        episode.reward = reward
        if isinstance(answer.reward, Mapping):
            return Failure("has rewards by agent and a get_reward: expected one of them")
        return replace(answer, reward=answer.reward + rise)

    def _close(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is not None:
            task = asyncio.create_task(self._finish(number, episode))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _finish(self, number: int, episode: _Episode) -> None:
        """Wait for the call under way to end, close the environment, and let another one begin."""
        if episode.task is not None:
            episode.task.cancel()
            await asyncio.wait([episode.task])
        if not episode.admitted:
            return
        try:
            if (
                self._rules.names
                and (failure := await self._rules.place.close(episode.key)) is not None
            ):
                logger.warning(
                    "the environment of episode %d could not be closed: %s", number, failure.reason
                )
        finally:
            if self._room is not None:
                self._room.release()

    async def _leave(self) -> None:
        self._left = True
        for number in list(self._episodes):
            self._close(number)
        if self._closing:
            await asyncio.wait(self._closing, timeout=PATIENCE)
        if self._closing:
            logger.warning(
                "%d environments did not close within %g s", len(self._closing), PATIENCE
            )
            self._rules.place.abandon()
            if self._closing:
                await asyncio.wait(self._closing, timeout=PATIENCE / 2)
