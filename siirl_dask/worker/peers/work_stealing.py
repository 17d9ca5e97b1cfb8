"""Work stealing among the workers of a role: a worker with nothing left to begin takes waiting
items of others.

Each worker begins with items of its own. The result of a stolen item is returned to the item's
owner, so the rows do not depend on who computed them. Only items that nobody has begun are stolen,
the last first, half of them at a time: the owner goes on from the front and rarely has to wait.

Three parts: ``WorkQueue`` holds a worker's items, ``StealService`` serves peers on the event loop,
and the thread that runs the node takes items from a ``StealableQueue``, its own first and then
stolen ones. Messages are bytes: numbered items or results one after the other, in which each long
value is a frame.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from reprlib import repr as short
from typing import Any, Generic, TypeVar

from siirl_dask.comms import wire
from siirl_dask.context import Codec
from siirl_dask.coordinator.databuffer.serving import Window
from siirl_dask.coordinator.transport.messages import Op, Reply, Request, TransitionKey, Transport
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.planner import Iteration, Node
from siirl_dask.worker.stop import StopFlag, result_of

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
# peers that a worker asks: the last busy one of a thousand must not be asked by all others
_MAX_PEERS = 16


class WorkQueue(Generic[I, R]):
    """Holds one worker's items and their results.

    Two threads use it: the one that works on the items, and the event loop's, which serves peers.
    An item is either waiting, begun here, or stolen; it leaves the waiting ones under the lock, so
    it is computed once.
    """

    def __init__(
        self,
        items: Sequence[I],
        codec: Codec[I, R],
        on_result: Callable[[int, R], None] | None = None,
    ) -> None:
        """``on_result`` is called with the number and the result of each item, in whichever
        thread brings it.
        """
        self.codec = codec
        self._on_result = on_result
        self._items = items
        self._waiting = deque(range(len(items)))
        self._stolen: set[int] = set()
        self._results: dict[int, R] = {}
        self._changed = threading.Condition()

    def has_waiting(self) -> bool:
        """Return whether an item has not begun."""
        with self._changed:
            return bool(self._waiting)

    def pop(self, limit: int) -> list[tuple[int, I]]:
        """Return the first items that wait, at most ``limit``, to be begun here."""
        with self._changed:
            numbers = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        return [(number, self._items[number]) for number in numbers]

    def steal(self, limit: int) -> bytes:
        """Return the last items that wait, packed for a peer that computes them: at most ``limit``,
        half of them, and what fits into a message.
        """
        stolen: list[bytes] = []
        size = 0
        codec = self.codec.of_message()
        with self._changed:
            half = -(-len(self._waiting) // 2)  # rounded up
            for _ in range(min(limit, half)):
                number = self._waiting[-1]
                packed = pack(number, codec.pack_item(self._items[number]))
                size += len(packed)
                if stolen and size > MESSAGE:
                    break
                self._stolen.add(self._waiting.pop())
                stolen.append(packed)
        return b"".join(stolen)

    def complete(self, number: int, result: R) -> None:
        """Store the result of an item that was begun here."""
        if self._on_result is not None:
            self._on_result(number, result)
        with self._changed:
            self._results[number] = result
            self._changed.notify_all()

    def complete_stolen(self, number: int, result: R) -> None:
        """Store a result that a peer computed. PeerError for an item that no peer has, or a
        second result.
        """
        with self._changed:
            if number not in self._stolen:
                raise PeerError(f"received a result for item {number!r}, which no peer has")
            self._stolen.remove(number)
        self.complete(number, result)

    def results(self, timeout: float) -> list[R] | None:
        """Return all results in order; None if some are missing after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._results) == len(self._items), timeout):
                return None
            return [self._results[number] for number in range(len(self._items))]


@dataclass(slots=True)
class StealService:
    """Serves one worker's queues to its peers, and steals from theirs. Belongs to the event
    loop.
    """

    run: str
    transport: Transport
    expected: ExpectedWork
    _queues: dict[TransitionKey, asyncio.Future[WorkQueue[Any, Any]]] = field(default_factory=dict)
    _forgotten: int = 0
    _aborted: str | None = None

    async def offer(self, key: TransitionKey, queue: WorkQueue[Any, Any]) -> None:
        """Serve a queue to peers, which may steal from it until its iteration is forgotten."""
        slot = self._slot(key)
        if not slot.done():
            slot.set_result(queue)

    async def handle(self, request: Request) -> Reply:
        """Answer a peer, as soon as this worker has reached the node of the request."""
        if request.key.run != self.run or request.key.sequence < self._forgotten:
            raise PeerError(f"refused {request.key}: there is no such work here")
        self.expected.check(request.key)
        queue = await asyncio.shield(self._slot(request.key))
        if request.op == Op.STEAL:
            limit = request.body.get("limit")
            if not isinstance(limit, int) or not 0 < limit <= MAX_ITEMS:
                raise PeerError(f"asked for {limit!r} items: expected 1 to {MAX_ITEMS}")
            return Reply({"items": queue.steal(limit)})
        for number, result in read(request.body.get("results")):
            queue.complete_stolen(number, queue.codec.read_result(result))
        return Reply()

    async def steal_from(
        self,
        peer: str,
        key: TransitionKey,
        limit: int,
        codec: Codec[I, R],
    ) -> list[tuple[int, I]]:
        """Return items of a peer that this worker computes from now on; none when all of its
        items are begun.
        """
        reply = await self.transport.request(
            peer, Request(Op.STEAL, key, {"limit": min(limit, MAX_ITEMS)})
        )
        codec = codec.of_message()
        return [(number, codec.read_item(item)) for number, item in read(reply.header.get("items"))]

    async def return_results(
        self,
        peer: str,
        key: TransitionKey,
        results: Sequence[tuple[int, Any]],
    ) -> None:
        """Send the results of stolen items to their owner, in as many messages as they need."""
        for message in messages_of(results):
            await self.transport.request(peer, Request(Op.RETURN, key, {"results": message}))

    def forget(self, before: int) -> None:
        """Drop the queues of iterations before sequence number ``before``."""
        self._forgotten = max(self._forgotten, before)
        outdated = [key for key in self._queues if key.sequence < before]
        for key in outdated:
            self._queues.pop(key).cancel()

    def abort(self, reason: str) -> None:
        """Wake every peer that waits here, now and later, with Aborted."""
        self._aborted = reason
        for slot in self._queues.values():
            self._fail(slot)

    def _slot(self, key: TransitionKey) -> asyncio.Future[WorkQueue[Any, Any]]:
        if key not in self._queues:
            self._queues[key] = asyncio.get_running_loop().create_future()
            if self._aborted is not None:
                self._fail(self._queues[key])
        return self._queues[key]

    def _fail(self, slot: asyncio.Future[WorkQueue[Any, Any]]) -> None:
        if not slot.done():
            slot.set_exception(Aborted(self._aborted or ""))
            slot.exception()  # marks it as seen: nobody may be waiting


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identifies an item that was taken: its number at its owner, and the owner."""

    owner: str | None
    """The peer; None for an item of this worker's own."""
    number: int


@dataclass(frozen=True, slots=True)
class LoopBridge:
    """Lets a node's thread run coroutines on the event loop and wait for them."""

    submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]]
    wait: Callable[[Future[Any]], Any]
    """Returns the result of a submitted coroutine. Aborted when the worker is told to stop
    meanwhile."""
    check: Callable[[], None]
    """Raises Aborted when the worker was told to stop."""


class StealableQueue(Generic[I, R]):
    """Gives a node's thread items to compute, its own first and then stolen ones, and collects the
    results.

    ``peers`` are asked for items in this order, one at a time. Only the node's thread calls it.
    """

    def __init__(
        self,
        queue: WorkQueue[I, R],
        key: TransitionKey,
        peers: Sequence[str],
        service: StealService,
        bridge: LoopBridge,
    ) -> None:
        self._queue = queue
        self._key = key
        self._service = service
        self._bridge = bridge
        self._peers = list(peers[:_MAX_PEERS])
        self._stealing: Future[Any] | None = None
        self._stolen: deque[tuple[Ticket, I]] = deque()
        """Stolen items that have not begun."""
        self._computed: dict[str, list[tuple[int, Any]]] = {}
        self._returning: list[Future[Any]] = []
        self.taken_over = 0
        """Number of items that were stolen."""
        bridge.wait(bridge.submit(service.offer(key, queue)))

    def next(self, limit: int, *, wait: bool) -> list[tuple[Ticket, I]]:
        """Return up to ``limit`` items to begin, each with a ticket for its result.

        With ``wait`` it returns none only when none are left anywhere; without it, stolen ones may
        still arrive.
        """
        self._bridge.check()
        self._return_results()
        own_items = self._queue.pop(limit)
        if own_items:
            return [(Ticket(None, number), item) for number, item in own_items]
        if not self._stolen:
            self._take_stolen(limit, wait=wait)
        # a peer was asked for as many as there was room for then
        return [self._stolen.popleft() for _ in range(min(limit, len(self._stolen)))]

    def ended(self) -> bool:
        """Return whether no item is left to begin, here or at a peer. Aborted when the worker was
        told to stop.
        """
        self._bridge.check()
        if self._stealing is not None or self._peers or self._stolen:
            return False
        return not self._queue.has_waiting()

    def complete(self, ticket: Ticket, result: R) -> None:
        """Store the result of an item; that of a stolen one is sent to its owner with the next
        call of ``next``.
        """
        if ticket.owner is None:
            self._queue.complete(ticket.number, result)
        else:
            packed = self._queue.codec.pack_result(result)
            self._computed.setdefault(ticket.owner, []).append((ticket.number, packed))

    def results(self) -> list[R]:
        """Wait for the results of this worker's own items, wherever they are computed, and
        return them in order.
        """
        self._return_results()
        for returning in self._returning:
            self._bridge.wait(returning)
        while (results := self._queue.results(timeout=0.1)) is None:
            self._bridge.check()
        return results

    def _take_stolen(self, limit: int, *, wait: bool) -> None:
        """Take the items that a peer has sent, and ask one for up to ``limit`` where none was
        asked.
        """
        if self._stealing is None and self._peers and limit:
            self._stealing = self._bridge.submit(self._steal(limit))
        stealing = self._stealing
        if stealing is None:
            return
        if not wait and not stealing.done():
            return
        self._stealing = None
        peer, items = self._bridge.wait(stealing)
        self.taken_over += len(items)
        self._stolen.extend((Ticket(peer, number), item) for number, item in items)

    async def _steal(self, limit: int) -> tuple[str, list[tuple[int, I]]]:
        while self._peers:
            peer = self._peers[0]
            items = await self._service.steal_from(peer, self._key, limit, self._queue.codec)
            if items:
                return peer, items
            self._peers.pop(0)  # its items are all begun, and it gets no new ones
        return "", []

    def _return_results(self) -> None:
        for owner, results in self._computed.items():
            returning = self._service.return_results(owner, self._key, results)
            self._returning.append(self._bridge.submit(returning))
        self._computed = {}


@dataclass(slots=True)
class StealableQueues:
    """Makes a worker's stealable queues, one for each call. ``placement`` is the workers of each
    role.
    """

    worker: str
    placement: Mapping[str, Sequence[str]]
    service: StealService
    loop: asyncio.AbstractEventLoop
    stop: StopFlag
    _latest: tuple[int, str] = (-1, "")
    _calls: int = 0

    def __call__(
        self,
        iteration: Iteration,
        node: Node,
        items: Sequence[Any],
        codec: Codec[Any, Any],
        on_result: Callable[[int, Any], None] | None = None,
    ) -> StealableQueue[Any, Any]:
        """Return a queue of ``items`` that the other workers of the node's role may steal from.

        Called from the node's thread, any number of times an iteration, but as often on each worker
        of the role: the count is part of the key by which queues of different workers belong
        together.
        """
        latest = (iteration.sequence, node.name)
        self._calls = self._calls + 1 if self._latest == latest else 0
        self._latest = latest
        key = TransitionKey(
            self.service.run, iteration.sequence, f"{iteration.plan}/{node.name}/{self._calls}"
        )
        bridge = LoopBridge(
            partial(asyncio.run_coroutine_threadsafe, loop=self.loop),
            partial(result_of, stop=self.stop),
            self.stop.check,
        )
        workers = list(self.placement[node.role])
        own_index = workers.index(self.worker)
        # so that not all ask the same peer first
        peers = workers[own_index + 1 :] + workers[:own_index]
        return StealableQueue(WorkQueue(items, codec, on_result), key, peers, self.service, bridge)


MAX_ITEMS = 2**12
"""Items or results in a message."""
MESSAGE = 2**24
"""Bytes of items or results in a message; a larger one is sent alone."""
_CALLS = frozenset(map(str, range(2**10)))  # queues of a node in an iteration


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """The work that may exist by the plan."""

    window: Window
    nodes: Collection[str]
    """The nodes, as ``phase/node``."""

    def check(self, key: TransitionKey) -> None:
        """Raise PeerError for other work: a request for it would wait, and be held in memory."""
        self.window.check(key)
        node, _, call = key.edge.rpartition("/")
        if node not in self.nodes or call not in _CALLS:
            raise PeerError(f"refused {short(key.edge)}: there is no such work here")


def pack(number: int, value: object) -> bytes:
    """Return a numbered item or result as bytes. PeerError when it is too large for a message."""
    packed = b"".join(wire.pack(number, value))
    if len(packed) > wire.MAX_REQUEST_FRAMES:
        raise PeerError(
            f"an item of shared work takes {len(packed)} bytes: expected at most "
            f"{wire.MAX_REQUEST_FRAMES}; set rollout.work_stealing=false for rows as long as this"
        )
    return packed


def messages_of(results: Sequence[tuple[int, Any]]) -> Iterator[bytes]:
    """Yield numbered results as bytes, cut into messages."""
    parts: list[bytes] = []
    size = 0
    for number, result in results:
        packed = pack(number, result)
        if parts and (size + len(packed) > MESSAGE or len(parts) == MAX_ITEMS):
            yield b"".join(parts)
            parts = []
            size = 0
        parts.append(packed)
        size += len(packed)
    yield b"".join(parts)


def read(packed: object) -> list[tuple[int, object]]:
    """Return numbered items or results that a peer sent. PeerError when ``packed`` holds
    anything else.
    """
    numbered = []
    for message in wire.read_messages(packed, wire.REQUEST, MAX_ITEMS):
        numbered.append((message.number, message.head))
    return numbered
