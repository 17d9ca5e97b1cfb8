"""Talks to one server of vLLM over HTTP: examines it, has it load weights, and asks again while it is
out of reach.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from siirl_dask.config import ServerConfig
from siirl_dask.errors import ConfigError, RunError

if TYPE_CHECKING:
    from tornado.httpclient import HTTPResponse

    from siirl_dask.http_client import EndingClient

logger = logging.getLogger("siirl_dask.rollout")
EXTENSION = "siirl_dask.rollout.server_engine.extension.LoadsWeights"
_GENERATE = "/inference/v1/generate"
_LARGEST = 256 * 2**20
"""Bytes of an answer, at most."""
_SHOWN = 500
"""Characters of a server's own words in an error, at most."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_OUT_OF_REACH = (502, 503, 504)
"""Statuses of a server that starts, ends, or is behind a proxy that does not reach it."""
_FAILURES = 3
"""Times that a server may fail at one request."""


class _OutOfReachError(Exception):
    """A server gives no answer now; it may later."""


class _FailedError(Exception):
    """A server failed at a request."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's own description of itself."""

    model: str
    """Path or name of the model that it was started with."""
    logprobs_mode: str
    dtype: str
    """Number type of its computation, such as ``float32``."""
    longest: int
    """Most tokens of a prompt and its response."""
    on_cpu: bool
    has_extension: bool
    """Whether its workers can load weights as ``extension`` does."""
    generation_config: str


class Server:
    """One server, asked from one event loop."""

    def __init__(
        self, url: str, config: ServerConfig, connections: int, progress: Callable[[], None]
    ) -> None:
        """``connections`` is the most requests under way at once. ``progress`` is called while a
        server that is out of reach is waited for: somebody may be starting it.
        """
        self.url = url.rstrip("/")
        self.under_way = 0
        """Requests for responses that it has."""
        self.restoring = asyncio.Lock()
        """Held by who gives it weights."""
        self._patience = config.patience
        self._timeout = config.timeout
        self._connections = connections
        self._progress = progress
        self._client: EndingClient | None = None
        self._warned = -_LONGEST_PAUSE

    async def examine(self, *, patiently: bool = True) -> ServerFacts:
        """Ask a server what it is, as ``ask`` does, or without ``patiently`` a single time.
        ConfigError for one that is no server of vLLM, or was started without what is needed.
        """
        path = "/server_info?config_format=json"
        if patiently:
            found = await self.ask("GET", path)
        else:
            try:
                found = await self._once("GET", path)
            except (_OutOfReachError, _FailedError) as error:
                raise ConfigError(f"{self.url}: it does not answer: {error}") from error
        await self._check_generates()
        try:
            config = found["vllm_config"]
            model = config["model_config"]
            return ServerFacts(
                model=str(model["model"]),
                logprobs_mode=str(model["logprobs_mode"]),
                dtype=str(model["dtype"]).removeprefix("torch."),
                longest=int(model["max_model_len"]),
                on_cpu=str(config["device_config"]["device"]) == "cpu",
                has_extension=config["parallel_config"]["worker_extension_cls"] == EXTENSION,
                generation_config=str(model["generation_config"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.url}: it does not describe itself as a server of vLLM 0.32 does: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def _check_generates(self) -> None:
        """Raise ConfigError for a server that takes no requests by tokens: it would refuse the
        first one of the run.
        """
        try:
            response = await self._fetch("GET", _GENERATE, None)
        except OSError:
            return  # it was there a moment ago, and is asked again
        if response.code == 404:  # one that takes them answers that they are not got
            raise ConfigError(
                f"{self.url}: it takes no requests at {_GENERATE}{_advice(404, _GENERATE)}"
            )

    async def label(self) -> str:
        """Return the label of the weights that it has; ``default``: those that it started with."""
        found = await self.ask("GET", "/weight_info")
        label = found.get("weight_version") if isinstance(found, dict) else None
        if not isinstance(label, str):
            raise RunError(f"{self.url}: /weight_info gave {found!r}; expected weight_version")
        return label

    async def load(self, method: str, options: dict[str, str], label: str) -> None:
        """Have every rank of the server call ``method``, which loads weights; they have ``label``
        from then on.

        A server that ends meanwhile has lost them: all of it is done again. RunError as ``ask``.
        """
        await self._patiently("/collective_rpc", lambda: self._load(method, options, label))

    async def _load(self, method: str, options: dict[str, str], label: str) -> None:
        begun = f"loading {label}"
        await self._once("POST", "/pause?mode=keep")
        await self._once("POST", "/update_weight_version", {"new_version": begun})
        await self._once("POST", "/collective_rpc", {"method": method, "kwargs": options})
        # also of requests under way: a server that was started again has some from before it had
        # its weights
        await self._once("POST", "/reset_prefix_cache?reset_running_requests=true")
        found = await self._once("GET", "/weight_info")
        if not isinstance(found, dict) or found.get("weight_version") != begun:
            raise _OutOfReachError("it was started again while it loaded weights")
        await self._once("POST", "/update_weight_version", {"new_version": label})
        await self._once("POST", "/resume")

    async def generate(self, body: dict[str, Any]) -> Any:
        """Return the answer to a request for a response."""
        self.under_way += 1
        try:
            return await self.ask("POST", _GENERATE, body)
        finally:
            self.under_way -= 1

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return a server's answer, as plain data; None for an empty one.

        A server that is out of reach is asked again, for ``patience`` seconds. RunError, with the
        server's words, where it refuses, fails three times, or stays out of reach.
        """
        return await self._patiently(path, lambda: self._once(method, path, body))

    async def _patiently(self, path: str, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Return what ``attempt`` returns, which is called again while the server is out of reach."""
        pause = _FIRST_PAUSE
        failures = 0
        since: float | None = None
        while True:
            try:
                return await attempt()
            except _OutOfReachError as error:
                problem = str(error)
            except _FailedError as error:
                problem = str(error)
                failures += 1
                if failures >= _FAILURES:
                    raise RunError(f"{self.url}{path}: {problem}") from error
            now = time.monotonic()
            if since is None:
                since = now
                self._warn(problem)
            if now - since > self._patience:
                raise RunError(
                    f"{self.url}{path}: out of reach for {self._patience:g} seconds "
                    f"(rollout.server.patience): {problem}; start the server and resume the run"
                )
            self._progress()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _warn(self, problem: str) -> None:
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

    async def _once(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer to one request. RunError for a refusal."""
        try:
            response = await self._fetch(method, path, body)
        except OSError as error:
            raise _OutOfReachError(str(error)) from error
        if response.code == 200:
            return _plain(response, self.url)
        words = response.body.decode(errors="replace")[:_SHOWN]
        problem = f"{response.code} {words}"
        if response.code in _OUT_OF_REACH:
            raise _OutOfReachError(problem)
        if response.code >= 500:
            raise _FailedError(problem)
        raise RunError(f"{self.url}{path}: {problem}{_advice(response.code, path)}")

    def close(self) -> None:
        """End all requests under way. Another one opens a connection again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _fetch(self, method: str, path: str, body: object) -> HTTPResponse:
        """Return one answer of the server. OSError where there is none."""
        from tornado.httpclient import HTTPClientError, HTTPRequest
        from tornado.iostream import StreamClosedError

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
            connect_timeout=min(self._timeout, 20.0),
            request_timeout=self._timeout,
            follow_redirects=False,
        )
        try:
            return await self._client.ask(request, raise_error=False)
        except (HTTPClientError, StreamClosedError) as error:
            raise ConnectionError(str(error)) from error


def _plain(response: HTTPResponse, url: str) -> Any:
    if not response.body:
        return None
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{url}: its answer is no JSON: {error}") from error


def _advice(code: int, path: str) -> str:
    """Return what to do about a refusal."""
    if "/inference" in path and code in (403, 404):
        return "; start vLLM's server with --enable-scale-out"
    if code == 404:
        return (
            "; start vLLM's server with VLLM_SERVER_DEV_MODE=1, or by python -m "
            "siirl_dask.rollout.server_engine.serve MODEL"
        )
    return ""
