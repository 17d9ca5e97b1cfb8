"""Carries requests between workers over comms of Dask: ``rows+unix`` within a host, ``rows+tcp``,
``rows+tls`` or ``rows+ucxx`` between hosts (``siirl_dask.comms``).

Neither the scheduler nor the client sees any of it. Both sides of a connection prove that they know
the secret of their run, the one who asks first, and close it where the run is another. A connection
carries one request at a time, and there are as many as requests are under way: the kernel's buffers
limit one over the round trip, several fill the link.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]  # Dask needs it
from distributed.comm.addressing import (
    get_address_host,
    parse_address,
    unparse_address,
    unparse_host_port,
)
from distributed.comm.core import CommClosedError, connect, listen

from siirl_dask.comms import wire
from siirl_dask.comms.access import NetworkAccess
from siirl_dask.comms.backends import register
from siirl_dask.comms.proofs import Side
from siirl_dask.comms.rows_comm import RowsComm
from siirl_dask.comms.sockets import Scheme, open_socket, open_unix_socket, peer_process
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request, answer_to
from siirl_dask.dask_internals import FatalCommClosedError
from siirl_dask.errors import Aborted, ConfigError, PeerError

if TYPE_CHECKING:
    from distributed.comm.core import Comm

logger = logging.getLogger("siirl_dask.coordinator")
_PAUSE = 0.1  # seconds between two attempts
_LOOKS = 4  # attempts to reach the listener of a peer that answers nothing
_MAX_IDLE = 512  # connections held for the next requests
_PER_MEMBER = 64  # connections that are answered here, for each member: all may be one member's
_STOPPED = (
    psutil.STATUS_STOPPED,
    psutil.STATUS_TRACING_STOP,
    psutil.STATUS_ZOMBIE,
    psutil.STATUS_DEAD,
)


def socket_name(run: str, worker: str, address: str) -> str:
    """Return the abstract name of a worker's socket. A successor of that name has another: its
    address differs.
    """
    return "siirl-" + sha256(f"{run} {worker} {address}".encode()).hexdigest()


class CommCarrier(ABC):
    """Carries requests to the members of a run, and answers theirs. Belongs to the event loop.

    ``secret`` is the run's, ``timeout`` the seconds that a connection may take to open, ``members``
    their number.
    """

    def __init__(
        self,
        run: str,
        handler: Handler,
        members: int,
        timeout: float,
        connects_with: Mapping[str, Any],
        *,
        secret: bytes,
    ) -> None:
        register()
        self._run = run
        self._secret = secret
        self._handler = handler
        self._max_served = _PER_MEMBER * members
        self._timeout = timeout
        self._connects_with = connects_with
        self._idle: dict[str, list[RowsComm]] = {}
        self._open: set[RowsComm] = set()
        self._served: set[Comm] = set()
        self._listener: Any = None
        self._closed = False

    @abstractmethod
    def address_of(self, worker: str) -> str:
        """Return the address of a member's listener. ConnectionError where it has none here."""

    @abstractmethod
    async def reaches(self, worker: str) -> bool: ...

    @abstractmethod
    async def runs(self, worker: str, seconds: float) -> bool: ...

    async def ask(self, worker: str, request: Request) -> Reply:
        comm = self._take_idle(worker)
        if comm is None:
            comm = await self._connect(self.address_of(worker))
        try:
            await comm.send(request.pack())
            message = await comm.receive(request.reply_bounds, request.places)
        except BaseException:
            # a reply may still be on its way: this connection cannot be used again
            self._drop(comm)
            raise
        self._put_back(worker, comm)
        return Reply.of(message)

    async def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.stop()
            self._listener.abort_handshaking_comms()
        for comm in (*self._open, *self._served):
            comm.abort()

    async def _listen(self, address: str, listens_with: Mapping[str, Any]) -> None:
        """Answer the requests that come to ``address``. OSError where that cannot be."""
        listener = listen(address, self._serve, secret=self._secret, **listens_with)
        await listener.start()
        self._listener = listener

    async def _connect(self, address: str) -> RowsComm:
        """Open a connection, and try again while there is time: a link may be down for a moment.
        OSError when not.

        A peer whose code holds the interpreter's lock is waited for as long as its process runs:
        the handshake has no limit of time, nor has a listener whose queue is full.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout
        while True:
            try:
                return await self._connect_once(address, max(_PAUSE, end - loop.time()))
            except FatalCommClosedError:
                raise
            except CommClosedError as error:
                # it was lost in the handshake: no request has been sent
                if loop.time() >= end:
                    raise
                logger.debug("connects to %s again: %s", address, error)
            except OSError as error:
                # of a Unix socket: somebody listens, and has not taken those that wait already
                if not isinstance(error.__cause__, BlockingIOError):
                    raise
            await asyncio.sleep(_PAUSE)

    async def _connect_once(self, address: str, timeout: float) -> RowsComm:
        self._check_not_closed()
        comm = await connect(address, timeout=timeout, **self._connects_with)
        assert isinstance(comm, RowsComm)
        try:
            await comm.authenticate(self._secret, Side.ASKS)
            self._check_not_closed()
        except BaseException:
            comm.abort()
            raise
        self._open.add(comm)
        return comm

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConnectionError("this side is closed")

    def _take_idle(self, worker: str) -> RowsComm | None:
        idle = self._idle.get(worker, [])
        while idle:
            comm = idle.pop()
            if not comm.closed():
                return comm
            self._drop(comm)
        return None

    def _put_back(self, worker: str, comm: RowsComm) -> None:
        if sum(map(len, self._idle.values())) < _MAX_IDLE:
            self._idle.setdefault(worker, []).append(comm)
        else:
            self._drop(comm)

    def _drop(self, comm: RowsComm) -> None:
        comm.abort()
        self._open.discard(comm)

    async def _serve(self, comm: Comm) -> None:
        """Answer the requests of one connection until it ends."""
        assert isinstance(comm, RowsComm)
        if len(self._served) >= self._max_served:
            logger.warning(
                "refused a connection from %s: there are %d", comm.peer_address, len(self._served)
            )
            comm.abort()
            return
        self._served.add(comm)
        try:
            while True:
                await self._answer_next(comm)
        except CommClosedError:
            # the peer has closed it, or is gone: whoever waits for that peer learns it by pings
            pass
        except Aborted:
            pass  # the peer is being aborted as well
        except PeerError as error:
            logger.warning("closed a connection from %s: %s", comm.peer_address, error)
        finally:
            self._served.discard(comm)
            comm.abort()

    async def _answer_next(self, comm: RowsComm) -> None:
        request = await comm.receive(wire.REQUEST)
        with comm.while_open():  # an answer that nobody waits for takes a place here
            head, frames = await answer_to(request.head, self._run, self._handler)
        await comm.send(head, frames)


class NetworkCarrier(CommCarrier):
    """Carries requests between hosts. ``members`` is {name: Dask address}; ``meet`` says at which
    ports they listen.
    """

    def __init__(
        self,
        run: str,
        members: Mapping[str, str],
        handler: Handler,
        network: NetworkAccess,
        timeout: float,
        *,
        secret: bytes,
    ) -> None:
        super().__init__(run, handler, len(members), timeout, network.connects_with, secret=secret)
        self._members = members
        self._network = network
        self._addresses: dict[str, str] = {}

    async def start(self) -> int:
        """Listen, and return the port. ConfigError where that fails."""
        network = self._network
        host = network.host
        failure = await self._listen_at(host)
        if failure is None:
            return self._port()
        if failure.errno == errno.EADDRNOTAVAIL and network.wildcard is not None:
            host = network.wildcard
            failure = await self._listen_at(host)
            if failure is None:
                return self._port()
        raise ConfigError(
            f"cannot listen on {host} for the requests of other workers: {failure}; "
            "expected the address of an interface of this host (dask worker --host), and a free "
            "port for each worker (data.port)"
        ) from failure

    def _port(self) -> int:
        _, port = self._listener.get_host_port()
        return int(port)

    async def _listen_at(self, host: str) -> OSError | None:
        """Listen at the first free port; return why that fails."""
        network = self._network
        failure: OSError | None = None
        for port in network.ports:
            place = unparse_host_port(host, port)
            try:
                await self._listen(unparse_address(network.scheme, place), network.listens_with)
            except OSError as error:
                failure = error
                if error.errno == errno.EADDRINUSE:
                    continue
                return failure
            return None
        return failure

    def meet(self, ports: Mapping[str, int]) -> None:
        """Learn the ports of all members. None is asked before."""
        for worker, port in ports.items():
            host = get_address_host(self._members[worker])
            place = unparse_host_port(host, port)
            self._addresses[worker] = unparse_address(self._network.scheme, place)

    def address_of(self, worker: str) -> str:
        if worker not in self._addresses:
            raise ConnectionError(f"nobody has said where worker {worker!r} listens")
        return self._addresses[worker]

    async def reaches(self, worker: str) -> bool:
        return worker in self._addresses

    async def runs(self, worker: str, seconds: float) -> bool:
        """The kernel takes a connection for a process that listens, whatever that does, and
        refuses one for another.
        """
        if worker not in self._addresses:
            return False
        _, place = parse_address(self._addresses[worker])
        loop = asyncio.get_running_loop()
        attempt = seconds / _LOOKS
        end = loop.time() + seconds
        while loop.time() < end:
            # TimeoutError as well: the way to it may be up again a moment later
            with suppress(OSError):
                async with asyncio.timeout(attempt):
                    sock = await open_socket(self._network.scheme, place)
                sock.close()
                return True
            await asyncio.sleep(min(_PAUSE, attempt))
        return False


class HostCarrier(CommCarrier):
    """Carries requests between processes of one host over Unix sockets: the kernel says of which
    user a peer is, and whether its process still runs.

    ``members`` is {name: Dask address}. A member of another host is not reached: no socket of its
    name is there.
    """

    def __init__(
        self,
        run: str,
        worker: str,
        members: Mapping[str, str],
        handler: Handler,
        timeout: float,
        *,
        secret: bytes,
    ) -> None:
        super().__init__(run, handler, len(members), timeout, {}, secret=secret)
        self._worker = worker
        self._members = members
        self._met: set[str] = set()
        """Members that were seen on this host."""
        self._pings: dict[str, asyncio.Task[Reply]] = {}

    async def start(self) -> None:
        if shared_memory_domain():
            await self._listen(self.address_of(self._worker), {})

    def meet(self) -> None:
        """Learn which members are on this host, while every member listens: one that ends before it
        is asked for the first time is then known to be gone at once, and is not taken for one of
        another host, whose link may have failed.
        """
        if shared_memory_domain():
            self._met = {each for each in self._members if self._process_of(each) is not None}

    def address_of(self, worker: str) -> str:
        name = socket_name(self._run, worker, self._members[worker])
        return unparse_address(Scheme.UNIX, name)

    async def ask(self, worker: str, request: Request) -> Reply:
        """A ping is one with the ping before it, where that has no answer yet: each new connection
        to a peer that stands still takes a place in the queue of its listener, and holds it when
        it is closed.
        """
        if request.op != Op.PING:
            return await super().ask(worker, request)
        ping = self._pings.get(worker)
        if ping is None or ping.done():
            ping = asyncio.create_task(super().ask(worker, request))
            ping.add_done_callback(_mark_as_seen)
            self._pings[worker] = ping
        return await asyncio.shield(ping)

    async def close(self) -> None:
        for ping in self._pings.values():
            ping.cancel()
        await super().close()

    async def reaches(self, worker: str) -> bool:
        """The kernel takes a connection for a process of this host, also for one that stands
        still.
        """
        if worker in self._met:
            return True
        if not shared_memory_domain():
            return False
        return self._process_of(worker) is not None

    async def runs(self, worker: str, seconds: float) -> bool:
        """The kernel refuses a connection to a process that has ended, and shows one that a signal
        stopped.
        """
        pid = self._process_of(worker)
        if pid is None:
            return False
        return not _is_stopped(pid)

    def _process_of(self, worker: str) -> int | None:
        """Return the process that listens for a member, 0 where it is not known; None where there
        is none.
        """
        address = self.address_of(worker)
        for comm in self._open:
            if comm.peer_address == address and not comm.closed():
                return int(comm.extra_info["pid"])
        _, name = parse_address(address)
        try:
            sock = open_unix_socket(name)
        except BlockingIOError:
            return 0  # it listens, and has not taken those that wait already
        except OSError:
            return None
        pid = peer_process(sock).pid
        sock.close()
        return pid


def _mark_as_seen(ping: asyncio.Task[Reply]) -> None:
    """Read its exception: where nobody waits for it any more, asyncio would log it."""
    if not ping.cancelled():
        ping.exception()


def _is_stopped(pid: int) -> bool:
    if not pid:
        return False
    try:
        return bool(psutil.Process(pid).status() in _STOPPED)
    except psutil.Error:  # it may be of another PID namespace, or hidden
        return False
