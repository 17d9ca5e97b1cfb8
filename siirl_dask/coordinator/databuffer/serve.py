"""Serves fetches: what a source does when a target asks for rows it has published. The asking side
is ``pull``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from siirl_dask.comms.wire import Pieces
from siirl_dask.coordinator.databuffer.arena import Arena, Attachments, CannotMap
from siirl_dask.coordinator.databuffer.limits import Budget, BufferLimits, CopyThreads
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.transport.messages import (
    Reply,
)
from siirl_dask.errors import PeerError
from siirl_dask.tables import Ints


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
        self, published: Published, positions: Ints, columns: Sequence[str], size: int
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
