"""Connections of rows over UCX, by ucxx. The package is needed to import this module."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from distributed.comm.addressing import parse_host_port
from distributed.comm.core import Comm, Connector

from siirl_dask.comms.listeners import ListenerOptions, RowsListener
from siirl_dask.comms.rows_comm import RowsComm
from siirl_dask.comms.sockets import Scheme, resolve, tls_context
from siirl_dask.comms.ucxx_stream import UcxProgress

logger = logging.getLogger("siirl_dask.comms")
_LINGER = 0.1  # seconds in which a listener that was stopped still closes those who come
_UNKNOWN = "0.0.0.0:0"  # the location of a side of which UCX says nothing


class UcxxConnector(Connector):
    """Opens connections over UCX."""

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> RowsComm:
        """Return a comm to a location, before its handshake, which fails where nobody listens.
        OSError for a host that nobody knows.
        """
        tls_context(Scheme.UCXX, connection_args)
        host, port = parse_host_port(address)
        _, place = (await resolve(host, port))[0]
        stream = UcxProgress.of_running_loop().stream_to(place[0], port)
        return RowsComm(stream, Scheme.UCXX, _UNKNOWN, address, deserialize=deserialize)


class UcxxListener(RowsListener):
    """Listens over UCX. It listens at every interface that UCX uses, whatever the location's host:
    ``UCX_NET_DEVICES`` names them.
    """

    def __init__(
        self,
        location: str,
        handle_comm: Callable[[Comm], object],
        options: ListenerOptions,
        certificates: Mapping[str, Any],
    ) -> None:
        super().__init__(Scheme.UCXX, location, handle_comm, options)
        tls_context(Scheme.UCXX, certificates)
        self._listener: Any = None
        self._progress: UcxProgress | None = None
        self._listens = False

    async def start(self) -> None:
        """Begin to listen. OSError where the port is taken."""
        host, port = self._place()
        progress = UcxProgress.of_running_loop()
        progress.acquire()
        try:
            self._listener = progress.listen(port, self._on_endpoint)
        except BaseException:
            progress.release()
            raise
        self._progress = progress
        self._listens = True
        self._bound = (host, self._listener.port)

    def stop(self) -> None:
        if self._listens:
            self._listens = False
            # those whose requests are on their way would wait: UCX tells them nothing without it
            asyncio.get_running_loop().call_later(_LINGER, self._end)
        self.end_handshakes()

    def _end(self) -> None:
        assert self._progress is not None
        self._listener = None
        self._progress.release()

    @property
    def listens(self) -> bool:
        return self._listens

    def _on_endpoint(self, endpoint: Any) -> None:
        """UCX calls it, and may not be called by it."""
        asyncio.get_running_loop().call_soon(self._accept, endpoint)

    def _accept(self, endpoint: Any) -> None:
        assert self._progress is not None
        if not self.listens:  # stopped meanwhile
            # not at once: UCX tells the peer nothing of an endpoint that is not connected yet
            loop = asyncio.get_running_loop()
            loop.call_later(_LINGER, self._progress.drop, endpoint)
            return
        try:
            stream = self._progress.stream_of(endpoint)
        except ConnectionError as error:
            logger.debug("a connection ended before its handshake: %s", error)
            return

        async def open_comm() -> RowsComm:
            deserialize = self._options.deserialize
            return RowsComm(stream, Scheme.UCXX, _UNKNOWN, _UNKNOWN, deserialize=deserialize)

        self.admit(stream, open_comm)
