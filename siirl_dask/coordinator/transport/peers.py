"""The transport of a worker: each peer is reached by the first carrier that can, and watched while
a reply is pending.

A peer is dead when its process or its host is. Pings come first: a peer's event loop answers them,
however long a node computes, unless code of the node holds the interpreter's lock. So one that
answers none is only suspected, and the kernel of its host is asked: it knows a process that has
ended, and on this host one that was stopped.

A link between hosts may fail for less than the peer timeout and nothing is lost: TCP sends again
what was under way, pings try new connections, and a read whose connection broke is asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from siirl_dask.coordinator.transport.messages import (
    NOT_REPEATABLE,
    Op,
    Reply,
    Request,
    TransitionKey,
)
from siirl_dask.errors import PeerError, PeerGone, SilentPeer

# Several coroutines at once: the first failure cancels the others and is raised as itself.


_T = TypeVar("_T")


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, _T]) -> list[_T]:
    """Return the results in order. The first exception cancels the rest and is raised once all of
    them have ended.

    A TaskGroup alone would raise an ExceptionGroup, which no ``except PeerError`` catches.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


# Pings, which distinguish a process that is gone from one that is busy, or behind a link that is
# down for a moment.


_SLICES = 10


async def answers(ping: Callable[[], Coroutine[Any, Any, bool]], seconds: float) -> bool:
    """Return whether one of several pings is answered within ``seconds``.

    ``ping()`` returns False where its connection failed, which may pass. Each slice of the time
    begins a new ping, over a new connection, and earlier ones go on: after an outage a new
    connection is up at once, where TCP waits longer each time before it repeats what an old one
    lost. A slice in which this process itself was frozen or starved does not count: the answer is
    read in the next.
    """
    loop = asyncio.get_running_loop()
    pause = seconds / _SLICES
    pings: set[asyncio.Task[bool]] = set()
    remaining = _SLICES
    try:
        while remaining:
            pings.add(asyncio.create_task(ping()))
            end = loop.time() + pause
            while pings:
                left = end - loop.time()
                if left <= 0:
                    break
                done, pings = await asyncio.wait(
                    pings, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if any(task.result() for task in done):
                    return True
            await asyncio.sleep(max(0.0, end - loop.time()))
            if loop.time() < end + pause:
                remaining -= 1
    finally:
        for task in pings:
            task.cancel()
    return False


logger = logging.getLogger("siirl_dask.coordinator")
_PING_EVERY = 0.05  # of the peer timeout: pause between rounds of pings
# of the peer timeout: time for an answer where no link can fail; the rest is for the news to spread
_ON_HOST = 0.8
_BETWEEN_HOSTS = 0.9  # of it: the rest is for the kernel of the peer's host
_ASKS = 4  # times that a read is asked when its connection breaks each time
_ASK_PAUSE = 0.2  # seconds before it is asked again


class PeerTransport:
    """Sends requests to the members of one run, by worker name. Belongs to the event loop.

    Args:
        members: {name: address}, fixed for the run.
        carriers: Ways to reach them, the best first; the last reaches everyone.
        peer_timeout: Seconds without a sign of life after which a peer counts as dead.
    """

    def __init__(
        self,
        run: str,
        members: Mapping[str, str],
        carriers: Sequence[Carrier],
        peer_timeout: float,
    ) -> None:
        self._run = run
        self._members = members
        self._carriers = carriers
        self._chosen: dict[str, Carrier] = {}  # by peer
        self._peer_timeout = peer_timeout
        # the timeouts of requests that await an answer, by peer
        self._pending: dict[str, set[asyncio.Timeout]] = {}
        # the request of each of these, and when it was made
        self._asked: dict[asyncio.Timeout, tuple[Request, float]] = {}
        # those that were ended because the peer answers no ping
        self._silent: set[asyncio.Timeout] = set()
        self._watched: dict[str, Callable[[str], None]] = {}
        self._pings: dict[str, asyncio.Task[None]] = {}
        # peers that answer no ping though their process is there, since when
        self._suspected: dict[str, float] = {}
        self._rounds: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._rounds = asyncio.create_task(self._ping_in_rounds())

    async def request(self, worker: str, request: Request) -> Reply:
        """Send a request and return the reply. PeerGone when the peer is gone,
        SilentPeer when it is silent, another PeerError when it refuses.

        A peer that is alive may take any time: whether anything gets done is watched for the run as
        a whole.
        """
        timeout = asyncio.timeout(None)
        pending = self._pending.setdefault(worker, set())
        pending.add(timeout)
        self._asked[timeout] = request, asyncio.get_running_loop().time()
        try:
            async with timeout:
                carrier = await self._carrier_to(worker)
                return await self._ask(carrier, worker, request)
        except TimeoutError as error:
            if timeout in self._silent:
                raise SilentPeer(self._place(worker, request) + self._silence()) from error
            raise self._gone(worker, request, error) from error
        except OSError as error:
            raise self._gone(worker, request, error) from error
        except PeerError as error:
            raise PeerError(self._place(worker, request) + str(error)) from error
        finally:
            pending.discard(timeout)
            self._asked.pop(timeout, None)
            self._silent.discard(timeout)

    def pending_replies(self) -> list[tuple[str, str, float]]:
        """Return each reply that is pending: the peer, the edge and what was asked for, and for
        how many seconds.
        """
        now = asyncio.get_running_loop().time()
        replies = []
        for worker, pending in self._pending.items():
            for timeout in pending:
                if timeout in self._asked:
                    request, since = self._asked[timeout]
                    replies.append((worker, f"{request.key.edge} ({request.op})", now - since))
        return replies

    def watch(self, worker: str, on_silence: Callable[[str], None]) -> None:
        """Ping a peer from now on, also while no reply is pending. ``on_silence`` is called once,
        with what is wrong, when it answers none.
        """
        self._watched[worker] = on_silence

    async def close(self) -> None:
        for task in (self._rounds, *self._pings.values()):
            if task is not None:
                task.cancel()
        for carrier in self._carriers:
            await carrier.close()

    async def _ask(self, carrier: Carrier, worker: str, request: Request) -> Reply:
        """Ask a peer, and again where a connection between hosts broke: a read may be repeated."""
        repeats = 0
        if carrier is self._carriers[-1] and request.op not in NOT_REPEATABLE:
            repeats = _ASKS - 1
        for _ in range(repeats):
            try:
                return await carrier.ask(worker, request)
            except OSError as error:
                logger.info("%s from worker %r is asked again: %s", request.op, worker, error)
                await asyncio.sleep(_ASK_PAUSE)
        return await carrier.ask(worker, request)

    async def _carrier_to(self, worker: str) -> Carrier:
        """Return the carrier to a peer, chosen at the first request. PeerError when none reaches
        it.
        """
        if worker in self._chosen:
            return self._chosen[worker]
        for carrier in self._carriers:
            if await carrier.reaches(worker):
                return self._chosen.setdefault(worker, carrier)
        raise PeerError("nothing here reaches it")

    def _silence(self) -> str:
        return (
            f"no sign of life within {self._peer_timeout:g} s (cluster.peer_timeout): "
            "its process has ended or was stopped, or it is cut off"
        )

    def _gone(self, worker: str, request: Request, error: OSError) -> PeerGone:
        return PeerGone(f"{self._place(worker, request)}the peer is gone ({error})")

    def _place(self, worker: str, request: Request) -> str:
        return (
            f"edge {request.key.edge}, {request.op} from worker {worker!r} at "
            f"{self._members[worker]}: "
        )

    async def _ping_in_rounds(self) -> None:
        """Ping each peer with a reply pending, and each that is watched, in rounds."""
        while True:
            await asyncio.sleep(_PING_EVERY * self._peer_timeout)
            self._pings = {worker: task for worker, task in self._pings.items() if not task.done()}
            awaited = {worker for worker, pending in self._pending.items() if pending}
            for worker in awaited | self._watched.keys():
                if worker not in self._pings:
                    self._pings[worker] = asyncio.create_task(self._check_alive(worker))

    async def _check_alive(self, worker: str) -> None:
        """Ping a peer, and end every wait for it when it does not answer in time and its process
        is not there.
        """
        carrier = self._chosen.get(worker, self._carriers[-1])
        waits = self._peer_timeout * (_BETWEEN_HOSTS if carrier is self._carriers[-1] else _ON_HOST)
        if await answers(lambda: self._ping(worker), waits):
            since = self._suspected.pop(worker, None)
            if since is not None:
                silent = asyncio.get_running_loop().time() - since
                logger.warning("worker %r answers again, after %.0f s", worker, silent)
            return
        if await carrier.runs(worker, self._peer_timeout - waits):
            self._suspect(worker, asyncio.get_running_loop().time() - waits)
            return
        for timeout in self._pending.get(worker, ()):
            self._silent.add(timeout)
            timeout.reschedule(asyncio.get_running_loop().time())
        on_silence = self._watched.pop(worker, None)
        if on_silence is not None:
            on_silence(f"worker {worker!r} at {self._members[worker]}: {self._silence()}")

    def _suspect(self, worker: str, since: float) -> None:
        """Log, once, that a silent peer is waited for; the next round asks it again."""
        if self._suspected.setdefault(worker, since) == since:
            logger.warning(
                "worker %r at %s answers nothing for %.0f s, and is waited for, since its process "
                "runs: code in it may hold the interpreter's lock",
                worker,
                self._members[worker],
                self._peer_timeout,
            )

    async def _ping(self, worker: str) -> bool:
        try:
            carrier = await self._carrier_to(worker)
            await carrier.ask(worker, Request(Op.PING, TransitionKey(self._run, -1, "")))
        except (OSError, PeerError):
            return False
        return True


class Carrier(Protocol):
    """Reaches workers by name. ``ask`` raises OSError when the peer is gone, PeerError when it
    refuses.
    """

    async def reaches(self, worker: str) -> bool: ...

    async def ask(self, worker: str, request: Request) -> Reply: ...

    async def runs(self, worker: str, seconds: float) -> bool:
        """Return whether the peer's process runs, as far as the kernel of its host shows within
        ``seconds``.

        Nothing in the process itself needs to answer.
        """
        ...

    async def close(self) -> None: ...
