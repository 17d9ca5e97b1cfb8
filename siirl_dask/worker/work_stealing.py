"""Work that workers of a role take over from one another: who is done first asks others for what they have not begun.

Each worker begins with items of its own. What is taken over goes back to its owner as a result, so who computed it
shows nowhere but in the time it took. Only items that wait are given away, the last first, and half of them at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from siirl_dask.coordinator.messages import Op, Reply, Request, TransitionKey, Transport
from siirl_dask.errors import Aborted, PeerError

ASKED = 16  # peers that a worker asks, at most: the last of a thousand must not be asked by all others
_MOST = 2**12  # items in a message
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Codec(Generic[I, R]):
    """Items and results as plain data and back. What reads raises PeerError for what it does not expect."""

    pack_item: Callable[[I], Any]
    read_item: Callable[[object], I]
    pack_result: Callable[[R], Any]
    read_result: Callable[[object], R]


class Pile(Generic[I, R]):
    """One worker's items. Used from the thread that works on them and from the loop that serves its peers."""

    def __init__(self, items: Sequence[I], codec: Codec[I, R]) -> None:
        self.codec = codec
        self._items = items
        self._waiting = deque(range(len(items)))
        self._lent: set[int] = set()
        self._results: dict[int, R] = {}
        self._changed = threading.Condition()

    @property
    def lent(self) -> int:
        """Items that peers have and not given back."""
        return len(self._lent)

    def take(self, most: int) -> list[tuple[int, I]]:
        """The first that wait, to be worked on here."""
        with self._changed:
            numbers = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        return [(number, self._items[number]) for number in numbers]

    def lend(self, most: int) -> list[tuple[int, I]]:
        """The last that wait, half of them at most, to be worked on elsewhere."""
        with self._changed:
            numbers = [self._waiting.pop() for _ in range(min(most, -(-len(self._waiting) // 2)))]
            self._lent.update(numbers)
        return [(number, self._items[number]) for number in numbers]

    def put(self, number: int, result: R) -> None:
        with self._changed:
            self._results[number] = result
            self._changed.notify_all()

    def put_back(self, number: object, result: R) -> None:
        """What a peer computed. PeerError for an item that no peer has."""
        with self._changed:
            if number not in self._lent:
                raise PeerError(f"received a result for item {number!r}, which no peer has")
            self._lent.remove(number)
            self._results[number] = result
            self._changed.notify_all()

    def results(self, timeout: float) -> list[R] | None:
        """All of them in order; None if some are missing after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._results) == len(self._items), timeout):
                return None
            return [self._results[number] for number in range(len(self._items))]


@dataclass(slots=True)
class Stealing:
    """One worker's part, on the event loop that serves its peers."""

    run: str
    transport: Transport
    _piles: dict[TransitionKey, asyncio.Future[Pile[Any, Any]]] = field(default_factory=dict)
    _forgotten: int = 0
    _aborted: str | None = None

    async def open(self, key: TransitionKey, pile: Pile[Any, Any]) -> None:
        """Let peers take from it, until its turn is forgotten."""
        slot = self._slot(key)
        if not slot.done():
            slot.set_result(pile)

    async def handle(self, request: Request) -> Reply:
        """Answer a peer, as soon as this worker has got to what it asks for."""
        if request.key.run != self.run or request.key.sequence < self._forgotten:
            raise PeerError(f"refused {request.key}: there is no such work here")
        pile = await asyncio.shield(self._slot(request.key))
        if request.op == Op.STEAL:
            most = request.body.get("most")
            if not isinstance(most, int) or not 0 < most <= _MOST:
                raise PeerError(f"asked for {most!r} items: expected 1 to {_MOST}")
            return Reply({"items": [[number, pile.codec.pack_item(item)] for number, item in pile.lend(most)]})
        for number, result in _pairs(request.body.get("results")):
            pile.put_back(number, pile.codec.read_result(result))
        return Reply()

    async def ask(self, peer: str, key: TransitionKey, most: int, codec: Codec[I, R]) -> list[tuple[int, I]]:
        """Items of a peer that are this worker's to do now."""
        reply = await self.transport.request(peer, Request(Op.STEAL, key, {"most": min(most, _MOST)}))
        return [(number, codec.read_item(item)) for number, item in _pairs(reply.header.get("items"))]

    async def bring_back(self, peer: str, key: TransitionKey, results: Sequence[tuple[int, Any]]) -> None:
        await self.transport.request(peer, Request(Op.BRING, key, {"results": [list(pair) for pair in results]}))

    def forget(self, before: int) -> None:
        """Drop what belongs to turns before sequence number ``before``."""
        self._forgotten = max(self._forgotten, before)
        for key in [key for key in self._piles if key.sequence < before]:
            self._piles.pop(key).cancel()

    def abort(self, reason: str) -> None:
        """Wake every peer that waits here, now and later."""
        self._aborted = reason
        for slot in self._piles.values():
            self._fail(slot)

    def _slot(self, key: TransitionKey) -> asyncio.Future[Pile[Any, Any]]:
        if key not in self._piles:
            self._piles[key] = asyncio.get_running_loop().create_future()
            if self._aborted is not None:
                self._fail(self._piles[key])
        return self._piles[key]

    def _fail(self, slot: asyncio.Future[Pile[Any, Any]]) -> None:
        if not slot.done():
            slot.set_exception(Aborted(self._aborted or ""))
            slot.exception()  # marks it as seen: nobody may be waiting


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whose item it is, None this worker's own, and which of its."""

    owner: str | None
    number: int


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """How another thread calls the loop."""

    submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]]
    wait: Callable[[Future[Any]], Any]
    """What was submitted has given. Aborted when the worker is told to stop."""
    check: Callable[[], None]
    """Aborted when the worker was told to stop."""


class SharedWork(Generic[I, R]):
    """A pile as the thread sees it that works on it, and on what it takes over from ``peers``, asked in this order."""

    def __init__(
        self,
        pile: Pile[I, R],
        key: TransitionKey,
        peers: Sequence[str],
        stealing: Stealing,
        calls: LoopCalls,
    ) -> None:
        self._pile, self._key, self._stealing, self._calls = pile, key, stealing, calls
        self._peers = list(peers[:ASKED])
        self._asked: Future[Any] | None = None
        self._back: dict[str, list[tuple[int, Any]]] = {}
        self._bringing: list[Future[Any]] = []
        self.taken_over = 0
        calls.wait(calls.submit(stealing.open(key, pile)))

    def take(self, most: int, *, wait: bool) -> list[tuple[Ticket, I]]:
        """Up to ``most`` items to begin with, own ones first. None are left anywhere when ``wait`` gives none; without
        it, others may still be on their way.
        """
        self._calls.check()
        self._bring_back()
        if own := self._pile.take(most):
            return [(Ticket(None, number), item) for number, item in own]
        if self._asked is None and self._peers:
            self._asked = self._calls.submit(self._steal(most))
        if self._asked is None or not (wait or self._asked.done()):
            return []
        asked, self._asked = self._asked, None
        peer, items = self._calls.wait(asked)
        self.taken_over += len(items)
        return [(Ticket(peer, number), item) for number, item in items]

    def give(self, ticket: Ticket, result: R) -> None:
        if ticket.owner is None:
            self._pile.put(ticket.number, result)
        else:
            packed = self._pile.codec.pack_result(result)
            self._back.setdefault(ticket.owner, []).append((ticket.number, packed))

    def results(self) -> list[R]:
        """Of this worker's own items, in order, when all are there."""
        self._bring_back()
        for bringing in self._bringing:
            self._calls.wait(bringing)
        while (results := self._pile.results(timeout=0.1)) is None:
            self._calls.check()
        return results

    async def _steal(self, most: int) -> tuple[str, list[tuple[int, I]]]:
        while self._peers:
            if items := await self._stealing.ask(self._peers[0], self._key, most, self._pile.codec):
                return self._peers[0], items
            self._peers.pop(0)  # its items are all begun: none will wait there again
        return "", []

    def _bring_back(self) -> None:
        back, self._back = self._back, {}
        self._bringing += [
            self._calls.submit(self._stealing.bring_back(owner, self._key, results)) for owner, results in back.items()
        ]


def _pairs(value: object) -> list[tuple[int, object]]:
    if not isinstance(value, list | tuple) or len(value) > _MOST:
        raise PeerError(f"received {str(value)[:80]!r}: expected a list of at most {_MOST} items")
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], int):
            raise PeerError(f"received {str(pair)[:80]!r}: expected a number and an item")
    return [(pair[0], pair[1]) for pair in value]
