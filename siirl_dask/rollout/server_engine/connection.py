"""Talks to one server over HTTP, and asks again while it is out of reach. Each kind of server is a
subclass, which knows its API.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from siirl_dask.config import ModelConfig, ServerConfig
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout.engine import GenerationRequest
from siirl_dask.rollout.server_engine.answers import EndedByServerError, ServedResponse

if TYPE_CHECKING:
    from tornado.httpclient import HTTPResponse

    from siirl_dask.http_client import EndingClient

_T = TypeVar("_T")
logger = logging.getLogger("siirl_dask.rollout")
_LARGEST = 256 * 2**20
"""Bytes of an answer, at most."""
SHOWN = 500
"""Characters of a server's own words in an error, at most."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_PAUSE_OF_FAILED = 0.5
"""Seconds before a server that failed at a request is asked again, at least: one whose engine has ended
says so to whoever asks, until it has ended as well."""
_OUT_OF_REACH = (429, 502, 503, 504)
"""Statuses of a server that has too much to do, starts, ends, or is behind a proxy that does not reach
it."""
_FAILURES = 3
"""Times that servers may fail at one request, or end while they work at it."""
_CONNECT_SECONDS = 20.0
"""Most seconds for a connection."""
LOADING = "loading "
"""Begins the label of weights while a server loads them."""


class OutOfReachError(Exception):
    """A server does not do what it is asked for now; it may later."""


class UnansweredError(OutOfReachError):
    """A server gave no answer at all: it refuses connections, or ended one."""


class SilentError(UnansweredError):
    """A server gave no answer in time."""


class _FailedError(Exception):
    """A server failed at a request."""


@dataclass(slots=True)
class Tries:
    """The tries of one request so far, on one server or on several."""

    failures: int = 0
    """Times that a server failed at it, or ended while it worked at it."""
    since: float | None = None
    """Time since which no server was in reach, or one was silent; None: the latest one was."""
    pause: float = _FIRST_PAUSE
    """Seconds until the next one."""

    def note_failure(self) -> None:
        """Note a try at which a server failed."""
        self.failures += 1
        self.pause = max(self.pause, _PAUSE_OF_FAILED)

    def note_end(self, seconds: float) -> None:
        """Note a try that a server ended, or did not begin, after so many seconds.

        One that had it under way for longer than a connection takes was in reach until then: the
        patience begins anew, so that two ends of a server during a long response are not taken for
        one. It has failed at the request, though, as one that a request ends does.
        """
        if seconds > _CONNECT_SECONDS:
            self.failures += 1
            self.since = None
            self.pause = _FIRST_PAUSE


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's own description of itself, as far as every kind of server gives it."""

    longest: int
    """Most tokens of a prompt and its response."""
    description: str
    """Model, number type, device and length, in a sentence."""


class Server(ABC):
    """One server, asked from one event loop."""

    def __init__(
        self,
        url: str,
        config: ServerConfig,
        connections: int,
        progress: Callable[[], None],
    ) -> None:
        """``connections`` is the most requests under way at once. ``progress`` is called while a
        server that is out of reach is waited for: somebody may be starting it.
        """
        self.url = url.rstrip("/")
        self.under_way = 0
        """Requests for responses that it has."""
        self.restoring = asyncio.Lock()
        """Held by who gives it weights."""
        self.can_stand_in: Callable[[], bool] = lambda: False
        """Whether another server is in reach that does what this one is asked for: nothing waits
        for this one then."""
        self._patience = config.patience
        self._timeout = config.timeout
        self._connections = connections
        self._progress = progress
        self._client: EndingClient | None = None
        self._warned = -_LONGEST_PAUSE

    @abstractmethod
    async def examine(self, *, patiently: bool = True) -> ServerFacts:
        """Ask a server what it is, as ``ask`` does, or without ``patiently`` a single time.
        ConfigError for one of another kind, and for one that does not answer that single time.
        """

    @abstractmethod
    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError for a server, once it is examined, whose samples would be others than
        the configuration's.
        """

    @abstractmethod
    async def label(self) -> str:
        """Return the label of the weights that it has; ``default``: those that it started with."""

    @abstractmethod
    async def load(self, folder: Path, label: str) -> None:
        """Have it load all weights in ``folder``, which have ``label`` from then on.

        A server that ends meanwhile has lost them: all of it is done again. RunError as ``ask``.
        """

    @abstractmethod
    async def respond(
        self, request: GenerationRequest, end_tokens: Collection[int], tries: Tries
    ) -> ServedResponse:
        """Return the response to one request, which each of ``end_tokens`` ends, and whose ``tries``
        are counted on all servers. Errors as ``ask``, and RunError for an answer of another form.
        """

    async def resume(self) -> None:
        """Let a server go on that has the weights in use and may be paused. Errors as ``ask``."""
        return  # one that is never paused

    async def go_on(self) -> str | None:
        """Let a server go on that was left paused; return a sentence about it, None for one that is
        not, or is out of reach. RunError for an answer of another form.
        """
        return None  # one that is never paused

    async def label_at(self, path: str) -> str:
        """Return the label of its weights that a server gives at a path. RunError as ``ask``, and
        for an answer without one.
        """
        found = await self.ask("GET", path)
        label = None
        if isinstance(found, dict):
            label = found.get("weight_version")
        if not isinstance(label, str):
            raise RunError(f"{self.url}: {path} gave {found!r:.200}; expected weight_version")
        return label

    async def generate(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[Any], ServedResponse],
        tries: Tries,
    ) -> ServedResponse:
        """Return the response that ``read`` finds in the answer to a request. A server that has ended
        it itself has failed at it, and is asked again.
        """

        async def attempt() -> ServedResponse:
            answer = await self.ask_once("POST", path, body)
            try:
                return read(answer)
            except EndedByServerError as error:
                raise _FailedError(str(error)) from error

        self.under_way += 1
        try:
            return await self.patiently(path, attempt, tries)
        finally:
            self.under_way -= 1

    async def describe(
        self,
        path: str,
        *,
        patiently: bool,
        method: str = "GET",
        body: object = None,
    ) -> Any:
        """Return a server's description of itself, as plain data. ConfigError, without
        ``patiently``, where it does not answer at once.
        """
        if patiently:
            return await self.ask(method, path, body)
        try:
            return await self.ask_once(method, path, body)
        except (OutOfReachError, _FailedError) as error:
            raise ConfigError(f"{self.url}: it does not answer: {error}") from error

    def advice(self, code: int, path: str) -> str:
        """Return what to do where a server refuses a request by this status; empty for nothing."""
        return ""

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return a server's answer, as plain data; None for an empty one.

        A server that is out of reach is asked again, for ``patience`` seconds, unless another one
        can stand in: that is an OutOfReachError. RunError, with the server's words, where it
        refuses, fails three times, or stays out of reach.
        """
        return await self.patiently(path, lambda: self.ask_once(method, path, body))

    async def patiently(
        self,
        path: str,
        attempt: Callable[[], Awaitable[_T]],
        tries: Tries | None = None,
        *,
        must_do_it: bool = False,
    ) -> _T:
        """Return what ``attempt`` returns, which is called again while the server is out of reach or
        fails, as ``tries`` says, those before this one included.

        OutOfReachError at once where another server ``can_stand_in``; for a failure only unless
        this server ``must_do_it``, as it must load weights: the others would fail as well.
        """
        if tries is None:
            tries = Tries()
        while True:
            asked = time.monotonic()
            moves = False
            try:
                return await attempt()
            except OutOfReachError as error:
                problem = error
                moves = self.can_stand_in()
                if not isinstance(problem, SilentError):
                    tries.note_end(time.monotonic() - asked)
            except _FailedError as error:
                problem = OutOfReachError(str(error))
                if not must_do_it:
                    moves = self.can_stand_in()
                tries.note_failure()
            if tries.failures >= _FAILURES:
                raise RunError(f"{self.url}{path}: it has failed {tries.failures} times: {problem}")
            if not moves or isinstance(problem, SilentError):
                self._check_patience(tries, path, problem)
            if moves:
                raise problem
            self._progress()
            await asyncio.sleep(tries.pause)
            tries.pause = min(2 * tries.pause, _LONGEST_PAUSE)

    def _check_patience(self, tries: Tries, path: str, problem: Exception) -> None:
        """Raise RunError where a request has waited for ``patience`` seconds."""
        now = time.monotonic()
        if tries.since is None:
            tries.since = now
            self._warn(problem)
        if now - tries.since > self._patience:
            raise RunError(
                f"{self.url}{path}: out of reach for {self._patience:g} seconds "
                f"(rollout.server.patience): {problem}; start the server and resume the run"
            )

    def _warn(self, problem: Exception) -> None:
        """Say that the server is out of reach, once for all requests that notice it together."""
        now = time.monotonic()
        if now - self._warned > _LONGEST_PAUSE:
            logger.warning(
                "%s is out of reach, and asked again for %g seconds: %s",
                self.url,
                self._patience,
                problem,
            )
        self._warned = now

    async def ask_once(
        self,
        method: str,
        path: str,
        body: object = None,
        failures: Collection[int] = (),
    ) -> Any:
        """Return the answer to one request. RunError for a refusal; ``failures`` are further statuses
        by which a server says that it failed.
        """
        try:
            response = await self.fetch(method, path, body)
        except TimeoutError as error:
            raise SilentError(str(error)) from error
        except OSError as error:
            raise UnansweredError(str(error)) from error
        if response.code == 200:
            return plain(response, self.url)
        words = response.body.decode(errors="replace")[:SHOWN]
        problem = f"{response.code} {words}"
        if response.code in _OUT_OF_REACH:
            raise OutOfReachError(problem)
        if response.code >= 500 or response.code in failures:
            raise _FailedError(problem)
        raise RunError(f"{self.url}{path}: {problem}{self.advice(response.code, path)}")

    def close(self) -> None:
        """End all requests under way. Another one opens a connection again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    async def fetch(self, method: str, path: str, body: object) -> HTTPResponse:
        """Return one answer of the server. OSError where there is none, TimeoutError where it did
        not come in time.
        """
        from tornado.httpclient import HTTPClientError, HTTPRequest
        from tornado.iostream import StreamClosedError
        from tornado.simple_httpclient import HTTPTimeoutError

        from siirl_dask.http_client import EndingClient

        if self._client is None:
            self._client = EndingClient(
                force_instance=True,
                max_clients=self._connections + 1,
                max_body_size=_LARGEST,
                max_buffer_size=_LARGEST,
            )
        request = HTTPRequest(
            f"{self.url}{path}",
            method=method,
            headers={"Content-Type": "application/json"},
            body=json.dumps(body) if method == "POST" else None,
            connect_timeout=min(self._timeout, _CONNECT_SECONDS),
            request_timeout=self._timeout,
            follow_redirects=False,
        )
        try:
            return await self._client.ask(request, raise_error=False)
        except HTTPTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except (HTTPClientError, StreamClosedError) as error:
            raise ConnectionError(str(error)) from error


def plain(response: HTTPResponse, url: str) -> Any:
    """Return what an answer has, as plain data; None where it is empty. RunError for no JSON."""
    if not response.body:
        return None
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{url}: its answer is no JSON: {error}") from error
