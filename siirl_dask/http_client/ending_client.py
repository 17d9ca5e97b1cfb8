"""A client of HTTP that ends the requests it has under way."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from weakref import WeakSet

from tornado.httpclient import HTTPRequest, HTTPResponse
from tornado.iostream import IOStream, StreamClosedError
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.tcpclient import TCPClient

_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds of silence, after which a connection's other host is asked every so many seconds whether it
is there, so often; options of the socket, by their names."""


class EndingClient(SimpleAsyncHTTPClient):
    """Its ``close`` closes the connections of requests under way as well, also those whose callers
    were cancelled: tornado leaves them to the server, which goes on working for nobody.

    A request fails two minutes after the server's host is gone, which ends no connections: a long
    response would be waited for until its timeout.
    """

    def initialize(self, **options: Any) -> None:  # type: ignore[override]
        super().initialize(**options)
        self._connections = _Connections(self.resolver)
        self.tcp_client = self._connections

    async def ask(self, request: HTTPRequest, *, raise_error: bool = True) -> HTTPResponse:
        """Return the response, as ``fetch`` does. Errors are ``fetch``'s.

        For callers that may be cancelled: tornado logs a traceback of a request that ends after
        its future was.
        """
        answer = asyncio.ensure_future(self.fetch(request, raise_error=raise_error))
        answer.add_done_callback(_look_at)
        return await asyncio.shield(answer)

    def close(self) -> None:
        self._connections.end()
        super().close()


class _Connections(TCPClient):
    """Opens connections, and remembers them."""

    def __init__(self, resolver: Any) -> None:
        super().__init__(resolver=resolver)
        self._open: WeakSet[IOStream] = WeakSet()
        self._ended = False

    async def connect(self, host: str, port: int, **options: Any) -> IOStream:  # type: ignore[override]
        stream = await super().connect(host, port, **options)
        if self._ended:
            stream.close()
            raise StreamClosedError
        _keep_alive(stream.socket)
        self._open.add(stream)
        return stream

    def end(self) -> None:
        """Close all connections, and any that opens from now on."""
        self._ended = True
        for stream in [*self._open]:
            stream.close()


def _keep_alive(connected: socket.socket) -> None:
    """Have the system end a connection whose other host does not answer any more."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:  # another system has it under another name, or hours
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _look_at(answer: asyncio.Future[HTTPResponse]) -> None:
    if not answer.cancelled():
        answer.exception()  # asyncio would report it as never retrieved
