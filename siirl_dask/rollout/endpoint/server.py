"""The endpoint: an HTTP server in a thread of a rollout worker, through which agents talk to the
worker's engine.

It speaks OpenAI's ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``. The bearer
token of a request tells whose it is: each episode has its own. Tornado is imported where the server
starts, so that a policy can be trained where it is not installed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from siirl_dask.config import EndpointConfig
from siirl_dask.context import Rank
from siirl_dask.errors import ConfigError, clause
from siirl_dask.rollout.endpoint.conversations import Conversation
from siirl_dask.rollout.endpoint.queue import AgentQueue
from siirl_dask.rollout.endpoint.serving import Serving
from siirl_dask.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from tornado.httpserver import HTTPServer

# times the largest body that is read and thrown away, so that its sender hears why it is refused
_DISCARDED = 64
_HEADERS = 64 * 1024  # bytes
_BODY_TIMEOUT = 60.0  # seconds in which a body must come
_IDLE_TIMEOUT = 120.0  # seconds for which a connection without a request stays open
_PATIENCE = 5.0  # seconds for the server's thread to start or end


class Endpoint:
    """A server on a thread and event loop of its own, while inside; leaving it closes the listener
    and connections.

    ConfigError when it cannot listen where the configuration says.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        queue: AgentQueue,
        config: EndpointConfig,
        rank: Rank,
    ) -> None:
        self._config = config
        self._port = config.port + rank.rank if config.port else 0
        self.serving = Serving(engine, queue, config)
        """The state that its handlers share."""
        self._loop = asyncio.new_event_loop()
        self._sockets: list[socket.socket] = []
        self._server: HTTPServer | None = None
        self._thread = threading.Thread(target=self._run, name="siirl-endpoint", daemon=True)

    @property
    def base_url(self) -> str:
        """URL that clients are given, with the version of the API."""
        host, port = self._sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def open(self, key: str, conversation: Conversation) -> None:
        """Let requests in whose bearer token is ``key``. Any thread may call this."""
        self.serving.episodes[key] = conversation

    def close(self, key: str) -> None:
        """Let no more requests in with ``key``. Any thread may call this."""
        self.serving.episodes.pop(key, None)

    def __enter__(self) -> Endpoint:
        from tornado.netutil import bind_sockets

        try:
            self._sockets = bind_sockets(self._port, self._config.host)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"endpoint.host={self._config.host!r}, endpoint.port={self._config.port}: cannot "
                "listen on port "
                f"{self._port}: {clause(error)}; expected an address of this machine, and a free port or 0"
            ) from error
        self._thread.start()
        self._call(self._serve)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _serve(self) -> None:
        from tornado.httpserver import HTTPServer
        from tornado.web import Application

        from siirl_dask.rollout.endpoint.handlers import Chat, Completions, Models, NotFound

        routes = [
            (r"/v1/chat/completions", Chat, {"serving": self.serving}),
            (r"/v1/completions", Completions, {"serving": self.serving}),
            (r"/v1/models", Models, {"serving": self.serving}),
            (r"/v1/models/(.+)", Models, {"serving": self.serving}),
        ]
        application = Application(
            routes,
            default_handler_class=NotFound,
            default_handler_args={"serving": self.serving},
            log_function=lambda handler: None,  # a refused request is the agent's to report
        )
        self._server = HTTPServer(
            application,
            max_header_size=_HEADERS,
            max_body_size=_DISCARDED * self._config.body_bytes,
            body_timeout=_BODY_TIMEOUT,
            idle_connection_timeout=_IDLE_TIMEOUT,
        )
        self._server.add_sockets(self._sockets)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.stop()
            await self._server.close_all_connections()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(_PATIENCE)
