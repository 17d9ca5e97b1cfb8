"""Runs agents, one for each episode: coroutines on an event loop of their own, or programs."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from siirl_dask.errors import EpisodeError
from siirl_dask.rollout.endpoint.conversations import Conversation, Segment
from siirl_dask.rollout.endpoint.server import Endpoint
from siirl_dask.wording import exception_text_with_place

_BEAT = 0.25  # seconds between two signs of life of the agents' event loop
_SLICE = 0.1  # seconds after which episodes of peers are asked for again
_PATIENCE = 5.0  # seconds for cancelled agents to end; one that goes on is left alone


@dataclass(frozen=True, slots=True)
class Client:
    """Tells an agent how to talk to the policy: ``AsyncOpenAI(base_url=client.base_url,
    api_key=client.api_key)``.
    """

    base_url: str
    """URL of the endpoint, with ``/v1``."""
    api_key: str
    """Token of the episode: requests that have it are part of it."""
    model: str
    """Name of the model in requests."""
    seed: int
    """Seed of the episode, the same on any worker, for what else is drawn in it."""


Agent = Callable[[Client, Mapping[str, Any]], Awaitable[Any]]
"""``async def agent(client, row)``: lives one episode and returns its reward."""


@dataclass(frozen=True, slots=True)
class ProgramEpisode:
    """An episode to be lived: the columns that its agent gets, and what records its requests."""

    row: Mapping[str, Any]
    seed: int
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Outcome:
    """An episode that has ended."""

    result: Any = None
    """The value that the agent returned."""
    failure: str | None = None
    """The reason why it returned nothing; None where it did."""
    segments: Sequence[Segment] = ()
    seconds: float = 0.0
    requests: int = 0


class EpisodeSource(Protocol):
    """Episodes to be lived, which peers may take over as long as they have not begun."""

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[Any, Any]]:
        """Return up to ``limit`` items, each with its ticket; with ``wait`` none only when there
        are none anywhere.
        """
        ...

    def complete(self, ticket: Any, result: Any) -> None:
        """Take what became of an item."""
        ...


@dataclass(slots=True, kw_only=True)
class AgentRuns:
    """Runs an agent for each episode of ``source``, on a thread of its own, while inside.

    ``done`` is called when all have ended. Once more than ``max_failures`` have failed, the others
    are given up.
    """

    agent: Agent
    source: EpisodeSource
    own: int
    """Number of episodes that the source began with; more come from peers."""
    make: Callable[[Any], ProgramEpisode]
    """Returns the episode of an item."""
    result: Callable[[ProgramEpisode, Outcome | None], Any]
    """Returns what goes to ``source`` as the result of an episode; its outcome is None if it was
    given up.
    """
    endpoint: Endpoint
    model: str
    max_open: int
    rows: int
    """Rows of the engine: no more agents of peers are taken over than can fill them."""
    timeout: float
    max_failures: int
    count: Callable[[int], None]
    """Called with 1 and -1 as an agent begins and ends."""
    done: Callable[[], None]
    _begun: int = 0
    _failures: int = 0
    _beat: float = 0.0
    _error: BaseException | None = None
    _running: dict[asyncio.Task[Outcome], tuple[Any, ProgramEpisode]] = field(default_factory=dict)
    """Agents that run, with the tickets of their episodes."""
    _waiter: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "siirl-agents-wait")
    )
    """Waits for episodes of peers. The loop's own threads may be taken by agents that block."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _main: asyncio.Task[None] | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> AgentRuns:
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="siirl-agents", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel the agents that still run, and kill their programs."""
        assert self._thread is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_PATIENCE)

    def check(self) -> None:
        """Raise EpisodeError where an agent has not let the others run for longer than an
        episode may take.
        """
        if self._thread is not None and time.monotonic() - self._beat > self.timeout + _PATIENCE:
            raise EpisodeError(
                f"an agent has blocked the event loop of all agents for more than {self.timeout:g} "
                "s (endpoint.timeout): await what takes long, call it with asyncio.to_thread, or "
                "give a command"
            )

    def finish(self) -> None:
        """Raise what ended the agents' thread, if anything did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        whole = False
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._all())
            whole = True
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # it is raised in the thread that waits for the agents
            self._error = error
        finally:
            # else it may wait for a peer, until the worker is told to stop
            self._waiter.shutdown(wait=whole)
            self.done()

    async def _all(self) -> None:
        self._main = asyncio.current_task()
        beating = asyncio.create_task(self._beats())
        try:
            while await self._begin_more() or self._running:
                if self._running:
                    await asyncio.wait(
                        self._running, timeout=_SLICE, return_when=asyncio.FIRST_COMPLETED
                    )
                self._complete()
                if self._failures > self.max_failures:
                    await self._end_all()
                    self._complete()
        finally:
            beating.cancel()
            await self._end_all()
            # now: the end of the loop waits for threads that an agent may have left behind
            self.done()

    async def _begin_more(self) -> int:
        """Begin as many agents as may run, or give them up; return how many episodes were taken.

        Those of peers are taken over only for rows of the engine that would stay empty.
        """
        most = self.max_open if self._begun < self.own else min(self.max_open, self.rows)
        room = most - len(self._running)
        if room <= 0:
            return 0
        taken = self.source.next(room, wait=False)
        if not taken and not self._running:
            taken = await self._loop.run_in_executor(
                self._waiter, partial(self.source.next, room, wait=True)
            )
        self._begun += len(taken)
        for ticket, item in taken:
            episode = self.make(item)
            if self._failures > self.max_failures:
                self.source.complete(ticket, self.result(episode, None))
            else:
                self._running[asyncio.create_task(self._one(episode))] = ticket, episode
        return len(taken)

    def _complete(self) -> None:
        """Tell the source of the agents that have ended."""
        for task in [task for task in self._running if task.done()]:
            ticket, episode = self._running.pop(task)
            outcome = None if task.cancelled() else task.result()
            self._failures += outcome is not None and outcome.failure is not None
            self.source.complete(ticket, self.result(episode, outcome))

    async def _end_all(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _one(self, episode: ProgramEpisode) -> Outcome:
        key = secrets.token_urlsafe(24)
        began = time.perf_counter()
        client = Client(self.endpoint.base_url, key, self.model, episode.seed)
        self.endpoint.open(key, episode.conversation)
        self.count(1)
        try:
            result, failure = await self._outcome(client, episode.row)
        finally:
            self.count(-1)
            self.endpoint.close(key)
            segments = episode.conversation.close()
        if failure is None and not segments:
            failure = "asked the model nothing"
        requests = episode.conversation.requests
        seconds = time.perf_counter() - began
        return Outcome(result, failure, segments, seconds, requests)

    async def _outcome(self, client: Client, row: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return what the agent returns, or the reason why it did not."""
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await self.agent(client, row), None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None, exception_text_with_place(error)
        except (
            Exception,
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # the last two would end the loop of all agents
            if limit.expired():
                return None, f"took more than {self.timeout:g} s"
            return None, exception_text_with_place(error)

    async def _beats(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT)

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()
