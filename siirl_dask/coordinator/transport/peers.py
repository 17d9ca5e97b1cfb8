"""The transport of a worker: each peer is reached by the first carrier that can, and watched while it owes an answer.

A peer that is dead or stands still is told from one that is busy by a sign of life that it is asked for meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from siirl_dask.coordinator.carrier import Carrier
from siirl_dask.coordinator.messages import Op, Reply, Request, TransitionKey
from siirl_dask.errors import PeerError

_ROUND = 0.2  # of the peer timeout: how often peers that owe an answer are asked for a sign of life
_SILENCE = 0.6  # of the peer timeout: how long that sign may take; the rest is for the word to go round


class PeerTransport:
    """Requests to the members of one run, by worker name.

    Args:
        members: {name: address}, fixed for the run.
        carriers: Ways to reach them, the best first; the last reaches everyone.
        peer_timeout: Seconds within which a peer that is dead or stands still is noticed.
        stall_timeout: Seconds that a peer which is alive may take to answer.
    """

    def __init__(
        self,
        run: str,
        members: Mapping[str, str],
        carriers: Sequence[Carrier],
        peer_timeout: float,
        stall_timeout: float,
    ) -> None:
        self._run = run
        self._members = members
        self._carriers = carriers
        self._chosen: dict[str, Carrier] = {}
        self._peer_timeout = peer_timeout
        self._stall_timeout = stall_timeout
        self._owed: dict[str, set[asyncio.Timeout]] = {}
        self._silent: set[asyncio.Timeout] = set()
        self._watched: dict[str, Callable[[str], None]] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._rounds: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._rounds = asyncio.create_task(self._go_round())

    async def request(self, worker: str, request: Request) -> Reply:
        waiting = asyncio.timeout(self._stall_timeout)
        owed = self._owed.setdefault(worker, set())
        owed.add(waiting)
        try:
            async with waiting:
                carrier = self._chosen.get(worker) or await self._choose(worker)
                return await carrier.ask(worker, request)
        except TimeoutError as error:
            silent = self._no_sign()
            slow = f"no answer within {self._stall_timeout:g} s (cluster.stall_timeout)"
            raise self._failed(worker, request, silent if waiting in self._silent else slow) from error
        except OSError as error:
            raise self._failed(worker, request, f"the peer is gone ({error})") from error
        except PeerError as error:
            raise self._failed(worker, request, str(error)) from error
        finally:
            owed.discard(waiting)
            self._silent.discard(waiting)

    def watch(self, worker: str, tell: Callable[[str], None]) -> None:
        """Ask a peer for signs of life from now on; ``tell`` is called once, with what is wrong, when it gives none."""
        self._watched[worker] = tell

    async def close(self) -> None:
        for task in (self._rounds, *self._asked.values()):
            if task is not None:
                task.cancel()
        for carrier in self._carriers:
            await carrier.close()

    async def _choose(self, worker: str) -> Carrier:
        for carrier in self._carriers:
            if await carrier.reaches(worker):
                return self._chosen.setdefault(worker, carrier)
        raise PeerError("nothing here reaches it")

    def _no_sign(self) -> str:
        return (
            f"no sign of life within {self._peer_timeout:g} s (cluster.peer_timeout): "
            "it stands still, is cut off, or code that it runs holds the interpreter's lock for so long"
        )

    def _failed(self, worker: str, request: Request, what: str) -> PeerError:
        where = f"edge {request.key.edge}, {request.op} from worker {worker!r} at {self._members[worker]}"
        return PeerError(f"{where}: {what}")

    async def _go_round(self) -> None:
        """Every so often ask each peer that owes an answer, or is watched, for a sign of life."""
        while True:
            await asyncio.sleep(_ROUND * self._peer_timeout)
            self._asked = {worker: task for worker, task in self._asked.items() if not task.done()}
            for worker in {*self._watched, *(worker for worker, owed in self._owed.items() if owed)}:
                if worker not in self._asked:
                    self._asked[worker] = asyncio.create_task(self._ask_for_sign(worker))

    async def _ask_for_sign(self, worker: str) -> None:
        """End every wait for a peer that gives none. In slices: a while in which this process stood still is one."""
        slices = 5
        ping = asyncio.create_task(self._ping(worker))
        try:
            for _ in range(slices):
                done, _ = await asyncio.wait({ping}, timeout=_SILENCE * self._peer_timeout / slices)
                if done and ping.result():
                    return
                if done:  # the connection failed, which may pass: time is what decides
                    await asyncio.sleep(_SILENCE * self._peer_timeout / slices)
                    ping = asyncio.create_task(self._ping(worker))
        finally:
            ping.cancel()
        for waiting in self._owed.get(worker, ()):
            self._silent.add(waiting)
            waiting.reschedule(asyncio.get_running_loop().time())
        if tell := self._watched.pop(worker, None):
            tell(f"worker {worker!r} at {self._members[worker]}: {self._no_sign()}")

    async def _ping(self, worker: str) -> bool:
        try:
            carrier = self._chosen.get(worker) or await self._choose(worker)
            await carrier.ask(worker, Request(Op.PING, TransitionKey(self._run, -1, "")))
        except (OSError, PeerError):
            return False
        return True
