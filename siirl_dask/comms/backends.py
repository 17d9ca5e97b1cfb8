"""The backends that Dask finds by the schemes of addresses (entry points
``distributed.comm.backends``).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from inspect import isawaitable
from typing import Any, ClassVar, TypeVar

from distributed.comm.addressing import get_local_address_for, parse_host_port, unparse_host_port
from distributed.comm.core import Comm, Connector
from distributed.comm.registry import Backend, backends

from siirl_dask.comms.byte_stream import ByteStream
from siirl_dask.comms.proofs import Side
from siirl_dask.comms.rows_comm import RowsComm
from siirl_dask.comms.sockets import (
    Scheme,
    check_user,
    name_of,
    open_socket,
    peer_process,
    resolve,
    secure,
    tune,
)
from siirl_dask.dask_internals import BaseListener, FatalCommClosedError, ensure_concrete_host

logger = logging.getLogger("siirl_dask.comms")
_HANDSHAKE_SECONDS = 9.0  # for a connection to say who it is
# seconds more: a process that stood still meanwhile reads first what has arrived
_GRACE = 1.0
_MAX_HANDSHAKES = 1024  # connections that have not said yet who they are
_BACKLOG = 2048  # connections that the kernel holds for a process that computes
_ACCEPTS = 64  # connections that are accepted before others have their turn
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 1.0  # seconds without accepting when descriptors have run out

_T = TypeVar("_T")


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
        context = _tls_context(self._scheme, connection_args)
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


class RowsListener(BaseListener):
    """Listens at one location, and hands over each connection after its handshake.

    ``handshake_overrides`` is sent to whoever connects. With a ``secret`` each connection must
    prove that it knows it, as ``RowsComm.authenticate`` does, and this side proves it then. A
    connection that has not done so within 10 seconds is closed.
    """

    def __init__(
        self,
        scheme: Scheme,
        location: str,
        handle_comm: Callable[[Comm], object],
        deserialize: bool = True,
        *,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        handshake_overrides: Mapping[str, Any] | None = None,
        secret: bytes | None = None,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        self._scheme = scheme
        self._location = location
        self._handle_comm = handle_comm
        self._deserialize = deserialize
        self._allow_offload = allow_offload
        self._default_host = default_host
        self._default_port = default_port
        self._overrides = dict(handshake_overrides) if handshake_overrides is not None else {}
        self._secret = secret
        self._context = _tls_context(scheme, connection_args)
        self._sock: socket.socket | None = None
        self._bound = ("", 0)
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to listen. OSError where the address is not this host's, or is taken."""
        family: socket.AddressFamily = socket.AF_UNIX
        place: Any = f"\0{self._location}"
        if self._scheme is not Scheme.UNIX:
            host, port = parse_host_port(self._location, self._default_port)
            family, place = (await resolve(host if host else "0.0.0.0", port))[0]
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
        """Accept no more connections, and close those whose handshake is under way. Those that are
        established stay.
        """
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        for task in self._handshakes:
            task.cancel()

    @property
    def listen_address(self) -> str:
        if self._scheme is Scheme.UNIX:
            return self._scheme.prefix + self._location
        host, port = self.get_host_port()
        return self._scheme.prefix + unparse_host_port(host, port)

    @property
    def contact_address(self) -> str:
        if self._scheme is Scheme.UNIX:
            return self.listen_address
        host, port = self.get_host_port()
        concrete = ensure_concrete_host(host, default_host=self._default_host)
        return self._scheme.prefix + unparse_host_port(concrete, port)

    def get_host_port(self) -> tuple[str, int]:
        """Return the address that it is bound to."""
        return self._bound

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
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock, place))
            self._handshakes[task] = sock
            self._tasks.add(task)  # the loop itself keeps no reference to a task
            task.add_done_callback(self._close_unless_established)
            task.add_done_callback(self._tasks.discard)

    def _accept_again(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    async def _serve(self, sock: socket.socket, place: Any) -> None:
        try:
            comm = await _within_limit(self._greet(sock, place))
        except OSError as error:
            logger.debug("a connection ended before its handshake: %s", error)
            return
        task = asyncio.current_task()
        assert task is not None
        del self._handshakes[task]
        if self._sock is None:  # stopped meanwhile
            comm.abort()
            return
        try:
            handled = self._handle_comm(comm)
            if isawaitable(handled):
                await handled
        except Exception:
            logger.exception("the handler of a connection from %s failed", comm.peer_address)
            comm.abort()

    def _close_unless_established(self, task: asyncio.Task[None]) -> None:
        sock = self._handshakes.pop(task, None)
        if sock is not None:
            sock.close()

    async def _greet(self, sock: socket.socket, place: Any) -> RowsComm:
        """Return the comm of a connection once both sides have said who they are. OSError where
        the peer does not.
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
        comm = RowsComm(stream, self._scheme, name_of(sock), peer, deserialize=self._deserialize)
        comm.allow_offload = self._allow_offload
        try:
            await self.on_connection(comm, self._overrides)
            if self._secret is not None:
                await comm.authenticate(self._secret, Side.ANSWERS)
        except BaseException:
            comm.abort()
            raise
        return comm

    def _peer_of(self, sock: socket.socket, place: Any) -> str:
        """Return the location of the peer. PermissionError for a process of another user."""
        if self._scheme is Scheme.UNIX:
            check_user(sock)
            return str(peer_process(sock).pid)
        return unparse_host_port(place[0], place[1])


class RowsTCP(Backend):
    """``rows+tcp://host:port``."""

    scheme: ClassVar[Scheme] = Scheme.TCP

    def get_connector(self) -> RowsConnector:
        return RowsConnector(self.scheme)

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[Comm], object],
        deserialize: bool,
        **connection_args: Any,
    ) -> RowsListener:
        return RowsListener(self.scheme, loc, handle_comm, deserialize, **connection_args)

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


def register() -> None:
    """Make the backends known to Dask in this process, also where the package's entry points are
    not installed.
    """
    for backend in (RowsTCP, RowsTLS, RowsUnix):
        backends.setdefault(str(backend.scheme), backend())


def _tls_context(scheme: Scheme, connection_args: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return what Dask's security says about TLS. RuntimeError where it demands encryption and
    the scheme has none, TypeError where TLS has no certificates.
    """
    if scheme is Scheme.TCP and connection_args.get("require_encryption"):
        raise RuntimeError(
            "encryption required by Dask configuration, refusing communication over "
            f"{scheme.prefix}: expected {Scheme.TLS.prefix}"
        )
    if scheme is not Scheme.TLS:
        return None
    context = connection_args.get("ssl_context")
    if not isinstance(context, ssl.SSLContext):
        raise TypeError(
            f"{scheme.prefix} expects certificates (distributed.comm.tls of Dask's configuration): "
            f"ssl_context is {context!r}"
        )
    return context


async def _within_limit(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of ``work``; TimeoutError when that takes too long. It has ended then, and
    when this is cancelled: it watches its socket, whose number another may get once it is closed.
    """
    task = asyncio.create_task(work)
    try:
        for seconds in (_HANDSHAKE_SECONDS, _GRACE):
            await asyncio.wait([task], timeout=seconds)
            if task.done():
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    raise TimeoutError("no handshake came in time")
