"""Serves a worker's rows to its peers: which keys they may name, what is published under each, and
the answer to a fetch. The asking side is ``pull``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from reprlib import repr as short
from typing import Any

from siirl_dask.comms.wire import Pieces
from siirl_dask.coordinator.databuffer.arena import Arena, Attachments, CannotMap
from siirl_dask.coordinator.databuffer.limits import Budget, BufferLimits, CopyThreads
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.relay import relay_of
from siirl_dask.coordinator.transport.messages import (
    Reply,
    TransitionKey,
)
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.planner import Edge
from siirl_dask.tables import Ints

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


class RowServer:
    """Answers fetches of one worker's published rows, within its share of the memory budget.

    Belongs to the event loop; only copies of rows leave it, for ``CopyThreads``.
    """

    def __init__(self, arena: Arena, copy_threads: CopyThreads, limits: BufferLimits) -> None:
        self._arena = arena
        self._copy_threads = copy_threads
        self._message_bytes = limits.message
        self._serving = Budget(limits.memory // 8)
        self._attachments = Attachments(writable=True)

    async def fetch(self, published: Published, positions: Ints, body: Mapping[str, Any]) -> Reply:
        """Write the rows at ``positions`` into the asker's memory, or return them in frames if it
        names no target.

        Other columns always travel in frames, of as many rows as fit into a message; the reply says
        how many, and the asker asks for the rest. PeerError for unknown columns, and for more bytes
        than a message has.
        """
        columns = body.get("columns")
        target = body.get("target")
        known = published.ragged_columns()
        if not isinstance(columns, list | tuple) or any(name not in known for name in columns):
            raise PeerError(f"asked for columns {str(columns)[:80]}: expected some of {known}")
        with_others = positions if body.get("others") else positions[:0]
        size = min(self._message_bytes, len(with_others) * published.other_row_bytes)
        others, frames, count = await self._copy_threads.run(
            size, published.pack_other_columns, with_others, self._message_bytes
        )
        if count:
            positions = positions[:count]
        header = {"rows": len(positions), "others": others, "split": len(frames)}
        size = published.ragged_bytes(positions, columns)
        if target is not None:
            try:
                write = partial(published.write_rows, positions, columns, target, self._attachments)
                await self._copy_threads.run(size, write)
            except CannotMap as error:
                return Reply({"cannot map": str(error)})
            return Reply(header | {"written": size}, frames)
        if size > self._message_bytes and len(positions) > 1:
            raise PeerError(
                f"asked for {size} bytes at once: expected at most {self._message_bytes}"
            )
        row_frames = await self._row_frames(published, positions, columns, size)
        return Reply(header, [*frames, *row_frames])

    def close(self) -> None:
        self._attachments.clear()

    async def _row_frames(
        self,
        published: Published,
        positions: Ints,
        columns: Sequence[str],
        size: int,
    ) -> Sequence[memoryview | Pieces]:
        """Return rows in frames. Their bytes count against the budget until the last of them has
        left this process, also where they are sent from where they lie.
        """
        await self._serving.acquire(size)
        try:
            frames = await self._copy_threads.run(
                size, published.row_frames, positions, columns, self._arena
            )
        except BaseException:
            self._serving.release(size)
            raise
        loop = asyncio.get_running_loop()
        for frame in frames:  # whoever sends a frame refers to it until the last byte is out
            held = frame if isinstance(frame, Pieces) else frame.obj
            weakref.finalize(held, self._release_on_loop, loop, frame.nbytes).atexit = False
        return frames

    def _release_on_loop(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        """Release budget from whatever thread drops a frame: budgets belong to the event loop."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits for the budget any more
            loop.call_soon_threadsafe(self._serving.release, nbytes)
