"""Keys that a worker's peers may name, and what is published under each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from reprlib import repr as short

from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.relay import relay_of
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.planner import Edge

_MAX_DIGITS = 10  # of a part's number
_MAX_AHEAD = 16  # parts beyond this worker's own: a source waits for everyone's acks after a few


class Window:
    """The window of iterations that peers may be in. Knows the latest that this worker has begun, and
    belongs to the event loop.

    The driver starts at most ``ahead`` iterations beyond the first that some worker has not
    completed. So a peer is at most in the one ``ahead`` after the next of this worker's own.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._latest = -1

    def begin(self, sequence: int) -> None:
        """Record that this worker is in the iteration with this sequence number, or past it."""
        self._latest = max(self._latest, sequence)

    def check(self, key: TransitionKey) -> None:
        """Raise PeerError for an iteration that no peer can have reached."""
        last = self._latest + 1 + self._ahead
        if not 0 <= key.sequence <= last:
            raise PeerError(
                f"refused iteration {key.sequence}: expected at most {last}, as this run can have "
                "begun"
            )


class PublishedSlots:
    """One slot a key, made for whoever is first, the publisher or a peer that waits for it."""

    def __init__(self) -> None:
        self._slots: dict[TransitionKey, asyncio.Future[Published]] = {}
        self.aborted: str | None = None

    def slot(self, key: TransitionKey) -> asyncio.Future[Published]:
        """Return the slot of a key, made if it is not there yet."""
        if key not in self._slots:
            self._slots[key] = asyncio.get_running_loop().create_future()
            if self.aborted is not None:
                self._fail(self._slots[key])
        return self._slots[key]

    async def wait(self, key: TransitionKey) -> Published:
        """Wait until something is published under a key, and return it."""
        # one that gives up waiting must not cancel the slot
        return await asyncio.shield(self.slot(key))

    def find(self, key: TransitionKey) -> Published | None:
        """Return what is published under a key; None before that, and after an abort."""
        if key not in self._slots:
            return None
        return _result(self._slots[key])

    def all_published(self) -> Iterator[Published]:
        """Yield everything that is published and not forgotten."""
        for slot in self._slots.values():
            published = _result(slot)
            if published is not None:
                yield published

    def forget(self, before: int) -> None:
        """Drop the slots of iterations before sequence number ``before``, but for tables that
        peers still read.
        """
        for key in [key for key in self._slots if key.sequence < before]:
            published = _result(self._slots[key])
            if published is None or not published.is_shared:
                self._slots.pop(key).cancel()

    def abort(self, reason: str) -> None:
        """Wake every wait, now and later, with Aborted."""
        self.aborted = reason
        for slot in self._slots.values():
            self._fail(slot)
        for published in self.all_published():
            published.all_acked.set()

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()

    def _fail(self, slot: asyncio.Future[Published]) -> None:
        if not slot.done():
            slot.set_exception(Aborted(self.aborted or ""))
            slot.exception()  # marks it as seen: not every slot has someone waiting


def _result(slot: asyncio.Future[Published]) -> Published | None:
    """Return what a slot holds; None before anything is published, and after an abort."""
    if not slot.done() or slot.cancelled() or slot.exception() is not None:
        return None
    return slot.result()


class ExpectedKeys:
    """Finds the edge that a peer's key names. Belongs to the event loop. ``edges`` are the
    run's, by ``phase/name``.

    A peer may name the edges, parts, relays and iterations that the plan can have, and no others:
    each key that is asked for before it is published makes something that waits for it, and a peer
    that makes keys up must not fill the memory with that.
    """

    def __init__(self, run: str, edges: Mapping[str, Edge], window: Window) -> None:
        self._run = run
        self._edges = edges
        self._window = window
        self._forgotten = 0
        self._parts: dict[tuple[int, str], int] = {}
        """The latest part that this worker is at, by sequence number and edge."""

    def own(self, key: TransitionKey, part: int | None) -> None:
        """Record a key that this worker itself publishes or pulls."""
        self._window.begin(key.sequence)
        if part is not None:
            name, _, _ = key.edge.rpartition("/")
            latest = self._parts.get((key.sequence, name), -1)
            self._parts[key.sequence, name] = max(part, latest)

    def forget(self, before: int) -> None:
        """Expect nothing of iterations before sequence number ``before`` any more."""
        self._forgotten = max(self._forgotten, before)
        self._parts = {
            (sequence, name): part
            for (sequence, name), part in self._parts.items()
            if sequence >= before
        }

    def edge(self, key: TransitionKey) -> Edge:
        """Return the edge that a peer's key names, of a part and of a relay as well. PeerError
        when there is none.
        """
        whole, relay = relay_of(key.edge)
        edge = self._edges.get(whole)
        if edge is None:
            name, _, part = whole.rpartition("/")
            last = self._parts.get((key.sequence, name), -1) + _MAX_AHEAD
            if (
                part.isdecimal()
                and len(part) < _MAX_DIGITS
                and part == str(int(part))
                and int(part) <= last
            ):
                edge = self._edges.get(name)
        if (
            key.run != self._run
            or edge is None
            or (relay is not None and relay >= len(edge.targets))
        ):
            raise PeerError(
                f"refused edge {short(key.edge)} of run {key.run}: this is run {self._run}, "
                "without it"
            )
        return edge

    def check_iteration(self, key: TransitionKey) -> None:
        """Raise PeerError for an iteration that is over, or that no peer can have reached."""
        if key.sequence < self._forgotten:
            raise PeerError(f"refused {key}: every worker has completed that iteration")
        self._window.check(key)
