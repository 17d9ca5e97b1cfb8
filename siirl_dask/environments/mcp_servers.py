"""Tools of servers that speak MCP (https://modelcontextprotocol.io), by the package ``mcp``:
``siirl_dask[mcp]``.

A server is started by its command line, or reached by its URL, once for each worker; all episodes
of it share it. One that has ended, or does not answer any more, is started or reached once more:
calls that were under way are lost, and so are their episodes.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from siirl_dask.environments.answers import cut
from siirl_dask.environments.event_loop import EventLoop
from siirl_dask.environments.places import guarded, within
from siirl_dask.environments.protocol import Failure, Lost
from siirl_dask.environments.tools import Schema
from siirl_dask.errors import ConfigError
from siirl_dask.wording import REDACTED, redacted, without_addresses

if TYPE_CHECKING:
    from mcp import Client

_START_TIMEOUT = 60.0  # seconds for all servers to start and to name their tools
_END_TIMEOUT = 10.0
_AGAIN_TIMEOUT = 60.0  # seconds for which a call waits until its server is there again
_PAUSE = 1.0  # seconds between two tries to reach a server
_ANSWER_TIMEOUT = 5.0  # seconds for a server to answer anything, after a call that failed

logger = logging.getLogger("siirl_dask.environments")
Remote = Callable[[Mapping[str, Any]], Coroutine[Any, Any, str | Failure]]


def check_installed(servers: Mapping[str, str]) -> None:
    """Raise ConfigError where servers are named and the package is not there, or a command lacks
    its secrets.
    """
    for name, server in servers.items():
        if REDACTED in server:
            raise ConfigError(
                f"environments.mcp_servers.{name}={server!r}: this is what a run recorded, without "
                "its secrets; give "
                f"the server once more, as in 'environments.mcp_servers={{{name}: ...}}'"
            )
    if not servers:
        return
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"environments.mcp_servers names {sorted(servers)}, and the package mcp is not "
            "installed: pip install 'siirl_dask[mcp]'"
        ) from error


class McpServers:
    """Connections to servers, which live on ``loop`` until ``end``. ConfigError for one that
    cannot be reached.
    """

    def __init__(
        self,
        servers: Mapping[str, str],
        loop: EventLoop,
        *,
        timeout: float | None,
        most: int,
    ) -> None:
        self._loop = loop
        self._leave = asyncio.Event()
        self._servers = [_Server(name, server, timeout, most) for name, server in servers.items()]
        self.tools: list[Schema] = []
        self.calls: dict[str, Remote] = {}
        self._connecting = Future[None]()
        self._serving = loop.run(self._serve())
        try:
            self._connecting.result(_START_TIMEOUT)
        except BaseException as error:
            self._serving.cancel()
            if isinstance(error, TimeoutError):
                late = [server.at for server in self._servers if not server.connected.is_set()]
                raise ConfigError(
                    f"{late[0]}: it gave no tools within {_START_TIMEOUT:g} s"
                ) from error
            raise
        for server in self._servers:
            self.tools += server.tools
            for tool in server.tools:
                name = tool["function"]["name"]
                self.calls[name] = partial(server.call, name)

    def end(self) -> None:
        """Close the connections, and end the servers that were started."""
        self._loop.call_soon(self._leave.set)
        self._serving.result(_END_TIMEOUT)

    async def _serve(self) -> None:
        """Hold the connections open, each in a task of its own."""
        holding = [asyncio.create_task(server.hold(self._leave)) for server in self._servers]
        try:
            for server, task in zip(self._servers, holding, strict=True):
                connected = asyncio.create_task(server.connected.wait())
                await asyncio.wait([connected, task], return_when=asyncio.FIRST_COMPLETED)
                # of the network, of a process, of the protocol: whatever the package raises
                if task.done():
                    connected.cancel()
                    error = task.exception()
                    self._connecting.set_exception(
                        ConfigError(f"{server.at}: {type(error).__name__}: {error}")
                    )
                    return
            self._connecting.set_result(None)
            await self._leave.wait()
        finally:
            self._leave.set()
            await asyncio.wait(holding)


class _Server:
    """A server of tools, and the connection to it. All methods belong to the event loop."""

    def __init__(self, name: str, server: str, timeout: float | None, most: int) -> None:
        self.name = f"environments.mcp_servers.{name}"
        self.at = f"{self.name}={redacted(server)!r}"
        self.connected = asyncio.Event()
        self.tools: list[Schema] = []
        self._server = server
        self._timeout = timeout
        self._most = most
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._last_error = ""

    async def hold(self, leave: asyncio.Event) -> None:
        """Hold a connection open until ``leave``, and open another one when it is lost; raise where
        there was none.

        The package wants a connection to be closed by the task that opened it.
        """
        known = False
        while not leave.is_set():
            try:
                async with self._open() as client:
                    if not known:
                        self.tools = await _tools_of(client)
                    known = True
                    self._client = client
                    self._lost.clear()
                    self.connected.set()
                    await _first_of(leave, self._lost)
            except Exception as error:
                # also of a connection that is closed though its server is gone
                if not known:
                    raise
                self._last_error = f"{type(error).__name__}: {error}"
            finally:
                self.connected.clear()
            if not leave.is_set():
                await _first_of(leave, timeout=_PAUSE)

    def _open(self) -> Client:
        from mcp import Client, StdioServerParameters

        if self._server.startswith(("http://", "https://")):
            return Client(self._server)
        words = shlex.split(self._server)
        if not words:
            words = [""]
        return Client(StdioServerParameters(command=words[0], args=words[1:]))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | Failure:
        """Return what a tool says; Lost where its server is not there, or went while it was
        called.
        """
        try:
            await asyncio.wait_for(self.connected.wait(), _AGAIN_TIMEOUT)
        except TimeoutError:
            why = ""
            if self._last_error:
                why = f": {self._last_error}"
            return Lost(
                without_addresses(
                    f"has lost its server, {self.name}, which does not come back{why}"
                )
            )
        client = self._client
        assert client is not None  # it is connected
        result = await guarded(self._result(client, name, arguments))
        if (
            isinstance(result, Failure)
            and not isinstance(result, _Said)
            and not await self._answers(client)
        ):
            return Lost(without_addresses(f"has lost its server, {self.name}: it {result.reason}"))
        return result

    async def _result(
        self,
        client: Client,
        name: str,
        arguments: Mapping[str, Any],
    ) -> str | Failure:
        answer = await within(self._timeout, client.call_tool(name, dict(arguments)))
        texts = [getattr(part, "text", f"[{part.type}]") for part in answer.content]
        text = cut("\n".join(texts), self._most)
        if answer.is_error:
            return _Said(f"failed: {without_addresses(text)}")
        return text

    async def _answers(self, client: Client) -> bool:
        """Return whether a server is there after a call that failed; the connection to another
        one is given up.
        """
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), _ANSWER_TIMEOUT)
        except Exception as error:  # whatever the package raises: it did not answer
            if self._client is client and not self._lost.is_set():
                logger.warning(
                    "%s is lost, and is started or reached once more: %s",
                    self.name,
                    type(error).__name__,
                )
                self.connected.clear()
                self._lost.set()
            return False
        return True


class _Said(Failure):
    """An error that the tool itself told: its server is there."""


async def _tools_of(client: Client) -> list[Schema]:
    """Return the schemas of a server's tools."""
    found: list[Schema] = []
    page: str | None = None
    while True:
        listed = await client.list_tools(cursor=page)
        for tool in listed.tools:
            described = {"name": tool.name, "description": tool.description or tool.name}
            found.append(
                {
                    "type": "function",
                    "function": {**described, "parameters": dict(tool.input_schema)},
                }
            )
        page = listed.next_cursor
        if page is None:
            return found


async def _first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Wait until one of the events is set, at most ``timeout`` seconds."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
