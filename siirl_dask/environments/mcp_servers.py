"""Tools of servers that speak MCP (https://modelcontextprotocol.io), by the package ``mcp``: ``siirl_dask[mcp]``.

A server is started by its command line, or reached by its URL, once for each worker; all episodes of it share it.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from siirl_dask.environments.answers import cut, without_addresses
from siirl_dask.environments.event_loop import EventLoop
from siirl_dask.environments.places import CallFailed, guarded, within
from siirl_dask.environments.protocol import Failure
from siirl_dask.environments.tools import Schema
from siirl_dask.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client

_START_TIMEOUT = 60.0  # seconds for all servers to start and to name their tools
_END_TIMEOUT = 10.0

Remote = Callable[[Mapping[str, Any]], Coroutine[Any, Any, str | Failure]]


def check_installed(servers: Mapping[str, str]) -> None:
    """Raise ConfigError where servers are named and the package is not there."""
    if not servers:
        return
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"environments.mcp_servers names {sorted(servers)}, and the package mcp is not installed: "
            "pip install 'siirl_dask[mcp]'"
        ) from error


class McpServers:
    """Connections to servers, which live on ``loop`` until ``end``. ConfigError for one that cannot be reached."""

    def __init__(self, servers: Mapping[str, str], loop: EventLoop, *, timeout: float | None, most: int) -> None:
        self._timeout = timeout
        self._most = most
        self._loop = loop
        self._at = "environments.mcp_servers"
        self._leave = asyncio.Event()
        self.tools: list[Schema] = []
        self.calls: dict[str, Remote] = {}
        self._connecting = Future[None]()
        self._serving = loop.run(self._serve(servers))
        try:
            self._connecting.result(_START_TIMEOUT)
        except BaseException as error:
            self._serving.cancel()
            if isinstance(error, TimeoutError):
                raise ConfigError(f"{self._at}: it gave no tools within {_START_TIMEOUT:g} s") from error
            raise

    def end(self) -> None:
        """Close the connections, and end the servers that were started."""
        self._loop.tell(self._leave.set)
        self._serving.result(_END_TIMEOUT)

    async def _serve(self, servers: Mapping[str, str]) -> None:
        """Hold the connections open: the package wants them closed by the task that opened them."""
        from mcp import Client, StdioServerParameters

        async with AsyncExitStack() as stack:
            for name, server in servers.items():
                self._at = f"environments.mcp_servers.{name}={server!r}"
                try:
                    command, *arguments = shlex.split(server) or [""]
                    is_url = server.startswith(("http://", "https://"))
                    way = server if is_url else StdioServerParameters(command=command, args=arguments)
                    client = await stack.enter_async_context(Client(way))
                    await self._add_tools(client)
                except Exception as error:  # of the network, of a process, of the protocol: whatever the package raises
                    self._connecting.set_exception(ConfigError(f"{self._at}: {type(error).__name__}: {error}"))
                    return
            self._connecting.set_result(None)
            await self._leave.wait()

    async def _add_tools(self, client: Client) -> None:
        page: str | None = None
        while True:
            listed = await client.list_tools(cursor=page)
            for tool in listed.tools:
                described = {"name": tool.name, "description": tool.description or tool.name}
                self.tools.append(
                    {"type": "function", "function": {**described, "parameters": dict(tool.input_schema)}}
                )
                self.calls[tool.name] = partial(self._call, client, tool.name)
            if (page := listed.next_cursor) is None:
                return

    async def _call(self, client: Client, name: str, arguments: Mapping[str, Any]) -> str | Failure:
        return await guarded(self._result(client, name, arguments))

    async def _result(self, client: Client, name: str, arguments: Mapping[str, Any]) -> str:
        answer = await within(self._timeout, client.call_tool(name, dict(arguments)))
        texts = [getattr(part, "text", f"[{part.type}]") for part in answer.content]
        text = cut("\n".join(texts), self._most)
        if answer.is_error:
            raise CallFailed(f"failed: {without_addresses(text)}")
        return text
