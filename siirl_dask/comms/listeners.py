"""The part that all listeners of rows share: a connection has seconds to say who it is."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, fields
from inspect import isawaitable
from typing import Any, Protocol, TypeVar

from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import Comm

from siirl_dask.comms.proofs import Side
from siirl_dask.comms.rows_comm import RowsComm
from siirl_dask.comms.sockets import Scheme
from siirl_dask.dask_internals import BaseListener, ensure_concrete_host

logger = logging.getLogger("siirl_dask.comms")
_HANDSHAKE_SECONDS = 9.0  # for a connection to say who it is
# seconds more: a process that stood still meanwhile reads first what has arrived
_GRACE = 1.0
_MAX_HANDSHAKES = 1024  # connections that have not said yet who they are

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerOptions:
    """Arguments of ``distributed.comm.listen`` that all listeners of rows take."""

    deserialize: bool = True
    allow_offload: bool = True
    default_host: str | None = None
    default_port: int = 0
    handshake_overrides: Mapping[str, Any] | None = None
    """Plain data that is sent to whoever connects, beyond the handshake."""
    secret: bytes | None = None
    """Bytes that each connection must prove that it knows, as ``RowsComm.authenticate`` does; this side
    proves it then. None: nobody proves anything."""

    @staticmethod
    def of(
        deserialize: bool, arguments: Mapping[str, Any]
    ) -> tuple[ListenerOptions, dict[str, Any]]:
        """Return the options among the arguments of ``listen``, and all others: certificates."""
        names = {each.name for each in fields(ListenerOptions)}
        options = {name: value for name, value in arguments.items() if name in names}
        others = {name: value for name, value in arguments.items() if name not in names}
        return ListenerOptions(deserialize=deserialize, **options), others


class Closable(Protocol):
    """A connection before its handshake."""

    def close(self) -> None: ...


class RowsListener(BaseListener):
    """Listens at one location, and hands over each connection after its handshake.

    A connection that has not said who it is within 10 seconds, and proved that it knows the secret
    where there is one, is closed.
    """

    def __init__(
        self,
        scheme: Scheme,
        location: str,
        handle_comm: Callable[[Comm], object],
        options: ListenerOptions,
    ) -> None:
        super().__init__()
        self._scheme = scheme
        self._location = location
        self._handle_comm = handle_comm
        self._options = options
        self._bound = ("", 0)
        self._handshakes: dict[asyncio.Task[None], Closable] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def stop(self) -> None:
        """Accept no more connections, and close those whose handshake is under way. Those that are
        established stay.
        """

    @property
    @abstractmethod
    def listens(self) -> bool:
        """Whether it has started, and has not been stopped."""

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
        concrete = ensure_concrete_host(host, default_host=self._options.default_host)
        return self._scheme.prefix + unparse_host_port(concrete, port)

    def get_host_port(self) -> tuple[str, int]:
        """Return the address that it is bound to."""
        return self._bound

    def _place(self) -> tuple[str, int]:
        """Return the host and the port to listen at."""
        host, port = parse_host_port(self._location, self._options.default_port)
        return host if host else "0.0.0.0", int(port)

    def admit(self, connection: Closable, open_comm: Callable[[], Awaitable[RowsComm]]) -> None:
        """Hand over a connection once it has said who it is, and close it where it does not:
        ``open_comm`` makes its comm, before the handshake.
        """
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(open_comm))
        self._handshakes[task] = connection
        self._tasks.add(task)  # the loop itself keeps no reference to a task
        task.add_done_callback(self._close_unless_established)
        task.add_done_callback(self._tasks.discard)

    def end_handshakes(self) -> None:
        """Close the connections whose handshake is under way."""
        for task in self._handshakes:
            task.cancel()

    async def _serve(self, open_comm: Callable[[], Awaitable[RowsComm]]) -> None:
        try:
            comm = await _within_limit(self._greet(open_comm))
        except OSError as error:
            logger.debug("a connection ended before its handshake: %s", error)
            return
        task = asyncio.current_task()
        assert task is not None
        del self._handshakes[task]
        if not self.listens:  # stopped meanwhile
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
        connection = self._handshakes.pop(task, None)
        if connection is not None:
            connection.close()

    async def _greet(self, open_comm: Callable[[], Awaitable[RowsComm]]) -> RowsComm:
        """Return the comm of a connection once both sides have said who they are. OSError where
        the peer does not.
        """
        comm = await open_comm()
        comm.allow_offload = self._options.allow_offload
        overrides = self._options.handshake_overrides
        try:
            await self.on_connection(comm, {} if overrides is None else dict(overrides))
            if self._options.secret is not None:
                await comm.authenticate(self._options.secret, Side.ANSWERS)
        except BaseException:
            comm.abort()
            raise
        return comm


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
