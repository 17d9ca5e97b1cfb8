"""Sockets for comms: opened, set up, and asked who is on the other side."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import dask
from distributed.comm.addressing import parse_host_port, unparse_host_port

from siirl_dask.dask_internals import FatalCommClosedError, parse_timedelta

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of struct ucred (unix(7))
_PROBES = 10  # that a peer's host leaves unanswered until a connection counts as lost


class Scheme(StrEnum):
    """The comms that carry rows, by the scheme of their addresses."""

    TCP = "rows+tcp"
    """Location ``host:port``."""
    TLS = "rows+tls"
    """Location ``host:port``; both sides show a certificate of the cluster."""
    UCXX = "rows+ucxx"
    """Location ``host:port``; over the endpoints of UCX, which speak tcp, shared memory or RDMA."""
    UNIX = "rows+unix"
    """Location: the name of an abstract socket (Linux), which has no file and ends with its
    process. Both sides are processes of one user."""

    @property
    def prefix(self) -> str:
        return f"{self}://"


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process on the other side of a Unix socket."""

    pid: int
    """0 where it is in another PID namespace."""
    uid: int
    gid: int


async def open_socket(scheme: Scheme, location: str) -> socket.socket:
    """Return a socket that is connected to ``location``, without TLS. OSError where nobody listens
    there; FatalCommClosedError, which no further attempt can cure, on this host.
    """
    if scheme is Scheme.UNIX:
        return open_unix_socket(location)
    host, port = parse_host_port(location)
    failure: OSError | None = None
    for family, place in await resolve(host, port):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, place)
        except OSError as error:
            sock.close()
            failure = error
            continue
        except BaseException:
            sock.close()
            raise
        tune(sock)
        return sock
    raise ConnectionError(f"cannot connect to {location}: {failure}")


def open_unix_socket(name: str) -> socket.socket:
    """Return a socket that is connected to the abstract socket ``name``. BlockingIOError where its
    listener has not taken those that wait already, FatalCommClosedError where nobody of this user
    listens.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        # at once, or not at all: asyncio would take a full queue for a connection under way
        sock.connect(f"\0{name}")
        check_user(sock)
    except (ConnectionRefusedError, PermissionError) as error:
        sock.close()
        raise FatalCommClosedError(f"no process of this host listens as {name}: {error}") from error
    except OSError:
        sock.close()
        raise
    return sock


async def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Return families and addresses of a host. OSError for a name that nobody knows."""
    kind = socket.SOCK_STREAM
    try:
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(host, port, type=kind, flags=numeric)
    except socket.gaierror:  # a name, which another thread looks up
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=kind)
    return [(family, place) for family, _, _, _, place in found]


def tune(sock: socket.socket) -> None:
    """Send short messages at once, and notice a host that is gone as Dask's tcp comms do."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not hasattr(socket, "TCP_KEEPIDLE"):
        return
    limit = dask.config.get("distributed.comm.timeouts.tcp")
    seconds = max(_PROBES + 1, int(parse_timedelta(limit, default="seconds")))
    interval = max(1, (seconds - max(2, seconds // 4)) // _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds - interval * _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def tls_context(scheme: Scheme, connection_args: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return what Dask's security says about TLS. RuntimeError where it demands encryption and
    the scheme has none, TypeError where TLS has no certificates.
    """
    if scheme in (Scheme.TCP, Scheme.UCXX) and connection_args.get("require_encryption"):
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


def peer_process(sock: socket.socket) -> PeerProcess:
    """Return the process on the other side of a Unix socket, as the kernel knows it."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return PeerProcess(pid, uid, gid)


def check_user(sock: socket.socket) -> None:
    """Raise PermissionError where a Unix socket leads to a process of another user."""
    peer = peer_process(sock)
    if peer.uid != os.geteuid():
        raise PermissionError(f"process {peer.pid} of user {peer.uid} was refused")


def name_of(sock: socket.socket) -> str:
    """Return the location of this side of a socket."""
    if sock.family == socket.AF_UNIX:
        return str(os.getpid())
    host, port = sock.getsockname()[:2]
    return unparse_host_port(host, port)


async def secure(
    sock: socket.socket,
    context: ssl.SSLContext,
    *,
    server: bool,
    hostname: str | None = None,
) -> ssl.SSLSocket:
    """Return the socket with TLS, once both sides have shown their certificates. SSLError where
    one does not fit.
    """
    secured = context.wrap_socket(
        sock,
        server_side=server,
        do_handshake_on_connect=False,
        server_hostname=hostname,
    )
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                await _ready(secured, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(secured, loop.add_writer, loop.remove_writer)
    except BaseException:
        secured.close()
        raise


async def _ready(
    sock: socket.socket, add: Callable[..., object], remove: Callable[[int], object]
) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    descriptor = sock.fileno()
    add(descriptor, _set, ready)
    try:
        await ready
    finally:
        remove(descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
