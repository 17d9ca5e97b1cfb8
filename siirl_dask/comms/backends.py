"""The backends that Dask finds by the schemes of addresses (entry points
``distributed.comm.backends``).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from distributed.comm.addressing import get_local_address_for, parse_host_port, unparse_host_port
from distributed.comm.core import Comm, Connector
from distributed.comm.registry import Backend, backends

from siirl_dask.comms.byte_stream import ByteStream
from siirl_dask.comms.listeners import ListenerOptions, RowsListener
from siirl_dask.comms.rows_comm import RowsComm
from siirl_dask.comms.sockets import (
    Scheme,
    check_user,
    name_of,
    open_socket,
    peer_process,
    resolve,
    secure,
    tls_context,
    tune,
)
from siirl_dask.dask_internals import FatalCommClosedError

logger = logging.getLogger("siirl_dask.comms")
_BACKLOG = 2048  # connections that the kernel holds for a process that computes
_ACCEPTS = 64  # connections that are accepted before others have their turn
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 1.0  # seconds without accepting when descriptors have run out


class RowsConnector(Connector):
    """Opens connections of one scheme."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> RowsComm:
        """Return a comm to a location, before its handshake. OSError where nobody listens there,
        FatalCommClosedError where certificates do not fit, or nobody on this host has the name.
        """
        context = tls_context(self._scheme, connection_args)
        sock = await open_socket(self._scheme, address)
        if context is not None:
            hostname = connection_args.get("server_hostname")
            try:
                sock = await secure(sock, context, server=False, hostname=hostname)
            except ssl.SSLError as error:
                raise FatalCommClosedError(
                    f"TLS with {address} failed: {error}; the certificates must be of one authority"
                ) from error
        stream = ByteStream(sock)
        return RowsComm(stream, self._scheme, name_of(sock), address, deserialize=deserialize)


class SocketListener(RowsListener):
    """Listens on a socket: ``rows+tcp``, ``rows+tls``, ``rows+unix``."""

    def __init__(
        self,
        scheme: Scheme,
        location: str,
        handle_comm: Callable[[Comm], object],
        options: ListenerOptions,
        certificates: Mapping[str, Any],
    ) -> None:
        super().__init__(scheme, location, handle_comm, options)
        self._context = tls_context(scheme, certificates)
        self._sock: socket.socket | None = None

    async def start(self) -> None:
        """Begin to listen. OSError where the address is not this host's, or is taken."""
        family: socket.AddressFamily = socket.AF_UNIX
        place: Any = f"\0{self._location}"
        if self._scheme is not Scheme.UNIX:
            host, port = self._place()
            family, place = (await resolve(host, port))[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self._scheme is not Scheme.UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # as Dask's tcp: a port of one family is not the other's
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(place)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        if self._scheme is not Scheme.UNIX:
            self._bound = sock.getsockname()[:2]
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._accept)

    def stop(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        self.end_handshakes()

    @property
    def listens(self) -> bool:
        return self._sock is not None

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS):
            if self._sock is None:
                return
            try:
                sock, place = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                logger.warning("accepts no connection for a moment: %s", error)
                loop.remove_reader(self._sock.fileno())
                loop.call_later(_PAUSE, self._accept_again)
                return
            self.admit(sock, partial(self._open, sock, place))

    def _accept_again(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    async def _open(self, sock: socket.socket, place: Any) -> RowsComm:
        """Return the comm of a connection before its handshake. OSError where the peer is of
        another user, or shows no certificate.
        """
        sock.setblocking(False)
        try:
            peer = self._peer_of(sock, place)
        except PermissionError as error:
            logger.warning("closed a connection: %s", error)
            raise
        tune(sock)
        if self._context is not None:
            sock = await secure(sock, self._context, server=True)
        stream = ByteStream(sock)
        return RowsComm(
            stream, self._scheme, name_of(sock), peer, deserialize=self._options.deserialize
        )

    def _peer_of(self, sock: socket.socket, place: Any) -> str:
        """Return the location of the peer. PermissionError for a process of another user."""
        if self._scheme is Scheme.UNIX:
            check_user(sock)
            return str(peer_process(sock).pid)
        return unparse_host_port(place[0], place[1])


class RowsTCP(Backend):
    """``rows+tcp://host:port``."""

    scheme: ClassVar[Scheme] = Scheme.TCP

    def get_connector(self) -> Connector:
        return RowsConnector(self.scheme)

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[Comm], object],
        deserialize: bool,
        **connection_args: Any,
    ) -> RowsListener:
        options, certificates = ListenerOptions.of(deserialize, connection_args)
        return SocketListener(self.scheme, loc, handle_comm, options, certificates)

    def get_address_host(self, loc: str) -> str:
        return str(parse_host_port(loc)[0])

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        host, port = parse_host_port(loc)
        return host, int(port)

    def resolve_address(self, loc: str) -> str:
        host, port = parse_host_port(loc)
        with suppress(OSError):
            host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return str(unparse_host_port(host, port))

    def get_local_address_for(self, loc: str) -> str:
        return str(get_local_address_for(f"tcp://{loc}")).removeprefix("tcp://")


class RowsTLS(RowsTCP):
    """``rows+tls://host:port``."""

    scheme = Scheme.TLS


class RowsUnix(RowsTCP):
    """``rows+unix://name``."""

    scheme = Scheme.UNIX

    def get_address_host(self, loc: str) -> str:
        return "127.0.0.1"

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        raise NotImplementedError

    def resolve_address(self, loc: str) -> str:
        return loc

    def get_local_address_for(self, loc: str) -> str:
        return loc


class RowsUCXX(RowsTCP):
    """``rows+ucxx://host:port``, where the package ucxx is installed."""

    scheme = Scheme.UCXX

    def get_connector(self) -> Connector:
        # importing it loads UCX, which few clusters speak
        from siirl_dask.comms.ucxx_backend import UcxxConnector

        return UcxxConnector()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[Comm], object],
        deserialize: bool,
        **connection_args: Any,
    ) -> RowsListener:
        from siirl_dask.comms.ucxx_backend import UcxxListener

        options, certificates = ListenerOptions.of(deserialize, connection_args)
        return UcxxListener(loc, handle_comm, options, certificates)


def register() -> None:
    """Make the backends known to Dask in this process, also where the package's entry points are
    not installed.
    """
    for backend in (RowsTCP, RowsTLS, RowsUnix, RowsUCXX):
        backends.setdefault(str(backend.scheme), backend())
