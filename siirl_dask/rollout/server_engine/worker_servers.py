"""The servers of one worker: they have the same weights, and take each other's requests while one
is out of reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout.engine import GenerationRequest
from siirl_dask.rollout.server_engine.answers import ServedResponse
from siirl_dask.rollout.server_engine.balance import choose_server
from siirl_dask.rollout.server_engine.connection import (
    LOADING,
    OutOfReachError,
    Server,
    Tries,
    UnansweredError,
)

logger = logging.getLogger("siirl_dask.rollout")
_STARTED_WITH = "default"
"""Label of the weights that a server of vLLM or SGLang started with."""
_MOST_MISTAKEN = 5
"""Answers of other weights than the server says that it has, one after the other. Some are those of a
server that was started again, whose weights another request has brought back."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
"""Seconds until a server that is out of reach is asked again, beside the requests."""
_UNANSWERED = 2
"""Times that such a server gives no answer before what it has under way is taken from it: where its
host is gone, nobody ends those connections."""


class WorkerServers:
    """The servers of one worker."""

    def __init__(
        self,
        servers: Sequence[Server],
        model: ModelConfig,
        *,
        engine: str,
        vocabulary: int | None,
        forget: Callable[[str], None],
        progress: Callable[[], None],
    ) -> None:
        """``engine`` is the name that labels of its weights begin with, ``vocabulary`` the number of
        the model's tokens, None where it does not say it. ``forget`` is called with the name of the
        engine whose weights a server had before, ``progress`` for each response and load.
        """
        self._servers = servers
        self._model = model
        self._engine = engine
        self._vocabulary = vocabulary
        self._forget = forget
        self._progress = progress
        self._folder: Path | None = None
        """None: there are no weights to load yet."""
        self._longest: dict[Server, int] = {}
        """Most tokens of a prompt and its response, of each server that was examined."""
        self._own: set[Server] = set()
        """Servers that have had weights of this engine."""
        self._lost: dict[Server, asyncio.Task[None] | None] = {}
        """Servers that are out of reach, each with what looks for it; None between two calls."""
        for server in servers:
            server.can_stand_in = self._others_of(server)

    @property
    def label(self) -> str:
        """Name of the weights in use, on servers: no other engine has it, and no others of the same
        version, as two agents' adapters may be.
        """
        return f"{self._engine}-{self._weights.name}"

    @property
    def _weights(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the servers were given no weights yet")
        return self._folder

    async def examine(self) -> int:
        """Ask the servers what they are, and return the most tokens of a prompt and its response.
        One that is out of reach while others are not is looked for later. ConfigError for one whose
        samples would be others, RunError where none is in reach for longer than ``patience``.
        """
        await self._on_each(self._servers, self._examine)
        return min(self._longest.values())

    async def check_own(self) -> None:
        """Raise RunError where somebody else has replaced a server's weights."""
        for server in self._in_reach():
            try:
                self._is_lacking(server, await server.label())
            except OutOfReachError as error:
                self._lose(server, error)

    async def load(self, folder: Path) -> None:
        """Have all servers in reach load the weights in ``folder``; any other gets them when it is
        found. Where one cannot load, the others end what they have begun: a server that nobody
        attends to any more would stay paused.
        """
        self._folder = folder
        await self._on_each(self._in_reach(), self._load_anyhow)

    async def respond(
        self, request: GenerationRequest, end_tokens: Collection[int]
    ) -> ServedResponse:
        """Return the response of one request, of the weights in use, which each of ``end_tokens``
        ends. RunError where no server is in reach for longer than ``patience``, and for tokens that
        the model does not have.
        """
        tries = Tries()
        mistaken = 0
        while True:
            self._check_looks()
            server = self._choose(request)
            try:
                answer = await server.respond(request, end_tokens, tries)
                if answer.labels == {self.label}:
                    self._check_vocabulary(server, answer)
                    self._find(server)
                    self._progress()
                    return answer
                mistaken += 1
                if await self._restored(server):
                    mistaken = 0
            except OutOfReachError as error:
                self._lose(server, error)
                continue
            if mistaken == _MOST_MISTAKEN:
                raise RunError(
                    f"{server.url}: it says that its weights are {self.label!r}, and its answers "
                    f"that they were sampled by {sorted(answer.labels)!r:.200}: expected one server "
                    "there, and no proxy that has several"
                )

    @asynccontextmanager
    async def looked_for(self) -> AsyncIterator[None]:
        """Look for servers that are out of reach, inside the block. One that gets its weights as the
        block ends is waited for: in blocks that are short it would never have them. Raises what was
        wrong with a server that was found.
        """
        for server in self._lost:
            self._lost[server] = self._look_for(server)
        try:
            yield
            self._check_looks()
        finally:
            looks = [look for look in self._lost.values() if look is not None]
            for server, look in self._lost.items():
                self._lost[server] = None
                if look is not None and not server.restoring.locked():
                    look.cancel()
            if looks:
                await asyncio.wait(looks)
            for look in looks:
                if not look.cancelled():
                    look.exception()  # the next block finds it again, if there is one

    def close(self) -> None:
        """End all requests under way."""
        for server in self._servers:
            server.close()

    def _others_of(self, server: Server) -> Callable[[], bool]:
        """Return what says whether another server is in reach, and examined."""
        return lambda: any(
            other is not server and other not in self._lost for other in self._longest
        )

    def _in_reach(self) -> Sequence[Server]:
        """Return the servers in reach; all of them where none is."""
        found = [server for server in self._servers if server not in self._lost]
        if not found:
            return self._servers
        return found

    def _choose(self, request: GenerationRequest) -> Server:
        among = self._in_reach()
        return among[choose_server(request.prompt, [server.under_way for server in among])]

    def _lose(self, server: Server, error: OutOfReachError) -> None:
        """Leave a server to the others, and look for it."""
        if server in self._lost:
            return
        logger.warning(
            "%s is out of reach: %s; other servers have its requests until it is there again",
            server.url,
            error,
        )
        self._lost[server] = self._look_for(server)

    def _find(self, server: Server) -> None:
        """Give a server requests again: it has the weights in use."""
        if server not in self._lost:
            return
        look = self._lost.pop(server)
        logger.warning("%s is there again", server.url)
        if look is not None and look is not asyncio.current_task():
            look.cancel()

    def _look_for(self, server: Server) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._look(server))

    async def _look(self, server: Server) -> None:
        """Ask a server whether it is there, until it has the weights in use or nobody looks for it
        any more.
        """
        pause = _FIRST_PAUSE
        unanswered = 0
        is_looked_for = True
        while is_looked_for:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                await self._restored(server)
            except OutOfReachError as error:
                unanswered += isinstance(error, UnansweredError)
                if unanswered == _UNANSWERED:
                    server.close()
                is_looked_for = self._lost.get(server) is asyncio.current_task()
            else:
                self._find(server)
                return

    def _check_looks(self) -> None:
        """Raise what was wrong with a server that was found."""
        for look in self._lost.values():
            if look is not None and look.done() and not look.cancelled():
                look.result()

    def _check_vocabulary(self, server: Server, answer: ServedResponse) -> None:
        """Raise RunError for tokens that the model does not have: a trainer would look them up
        outside its embedding.
        """
        highest = max(answer.generation.token_ids)
        if self._vocabulary is not None and highest >= self._vocabulary:
            raise RunError(
                f"{server.url}: it sampled the token {highest}, and the model has "
                f"{self._vocabulary} (vocab_size): expected a server of model.path"
            )

    async def _on_each(
        self, servers: Sequence[Server], do: Callable[[Server], Awaitable[None]]
    ) -> None:
        """Do it with all servers at once, and lose those out of reach. Where one raises, the others
        are cancelled, and end what they have begun.
        """
        tasks = [asyncio.ensure_future(self._do_or_lose(server, do)) for server in servers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.wait(tasks)
        failures = [one.exception() for one in tasks if not one.cancelled()]
        for failure in failures:
            if failure is not None:
                raise failure

    async def _do_or_lose(self, server: Server, do: Callable[[Server], Awaitable[None]]) -> None:
        try:
            async with server.restoring:
                await do(server)
        except OutOfReachError as error:
            self._lose(server, error)

    async def _examine(self, server: Server) -> None:
        """Ask a server what it is. ConfigError where its samples would be others, or it has less room
        than the run has begun with.
        """
        facts = await server.examine()
        server.check(self._model)
        least = min(self._longest.values(), default=0)
        if self._own and facts.longest < least:
            raise ConfigError(
                f"{server.url}: it takes {facts.longest} tokens, where the run began with {least}; "
                "start it with as many"
            )
        self._longest[server] = facts.longest

    async def _load_anyhow(self, server: Server) -> None:
        """Have a server load the weights in use, whatever it has."""
        if server not in self._longest:
            await self._examine(server)
        before = ""
        if server not in self._own:
            before = await server.label()
        await self._load(server, before)

    async def _load(self, server: Server, before: str) -> None:
        """Have a server, whose weights have the label ``before``, load those in use."""
        await server.load(self._weights, self.label)
        if server not in self._own:
            self._own.add(server)
            self._forget(engine_of(before))
        self._find(server)
        self._progress()

    async def _restored(self, server: Server) -> bool:
        """Give a server that was started again, or was out of reach, the weights in use; return
        whether it lacked them. RunError where others have replaced them, ConfigError for a server
        that was started again with other options.
        """
        async with server.restoring:
            if self._folder is None:
                await self._examine(server)
                return False
            label = await server.label()
            if not self._is_lacking(server, label):
                if server in self._lost:  # perhaps before it was told to go on
                    await server.resume()
                return False
            if label == _STARTED_WITH or server not in self._longest:
                await self._examine(server)
            await self._load(server, label)
            return True

    def _is_lacking(self, server: Server, label: str) -> bool:
        """Return whether a server, whose weights have ``label``, lacks those in use: it was started
        again, or was out of reach. RunError where others have replaced them.
        """
        if label == self.label:
            return False
        if server not in self._own:
            return True
        if label != _STARTED_WITH and engine_of(label) != self._engine:
            raise RunError(
                f"{server.url}: somebody else has replaced its weights: they are {label!r:.200}, and "
                f"expected were {self.label!r}; a server is for one run, and one engine of it"
            )
        return True


def engine_of(label: str) -> str:
    """Return the name of the engine that a server had its weights from, by their label, or while it
    loads them; any text where no engine's.
    """
    return label.removeprefix(LOADING).partition("-")[0]
