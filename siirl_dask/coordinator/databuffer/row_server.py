"""Answers fetches of a worker's published rows: in frames of a message, or by writing them into the
asker's memory. The asking side is ``fetch``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from siirl_dask.comms.wire import Frame, Pieces
from siirl_dask.coordinator.databuffer.arena import Arena, Attachments, CannotMap, unpack_handle
from siirl_dask.coordinator.databuffer.limits import Budget, BufferLimits, CopyThreads
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.ragged import CopyPlan, starts_of
from siirl_dask.coordinator.transport.messages import Reply, to_frames, unpack_ints
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
        table_columns = published.columns()
        known = list(table_columns.ragged)
        if not isinstance(columns, list | tuple) or any(name not in known for name in columns):
            raise PeerError(f"asked for columns {str(columns)[:80]}: expected some of {known}")
        with_others = positions if body.get("others") else positions[:0]
        size = min(self._message_bytes, len(with_others) * table_columns.other_row_bytes)
        others, frames, count = await self._copy_threads.run(
            size, pack_other_columns, published, with_others, self._message_bytes
        )
        if count:
            positions = positions[:count]
        header = {"rows": len(positions), "others": others, "split": len(frames)}
        size = table_columns.ragged_bytes(positions, columns)
        if target is not None:
            try:
                await self._copy_threads.run(
                    size,
                    write_rows,
                    published,
                    positions,
                    columns,
                    target=target,
                    attachments=self._attachments,
                )
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
                size, row_frames, published, positions, columns, arena=self._arena
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


def pack_other_columns(
    published: Published, positions: Ints, max_bytes: int
) -> tuple[dict[str, Any], list[Frame], int]:
    """Pack the other columns of the first rows, as many as fit into ``max_bytes``, at least
    one.

    Returns a header, frames, and the number of rows packed.
    """
    table_columns = published.columns()
    if not table_columns.others:
        return {}, [], len(positions)
    count = min(len(positions), max(1, max_bytes // max(1, table_columns.other_row_bytes)))
    others = published.other_columns(positions[:count])
    # rows differ; half of what fits on average converges fast
    while others.nbytes > max_bytes and count > 1:
        count = max(1, count * max_bytes // (2 * others.nbytes))
        others = published.other_columns(positions[:count])
    published.release_pages()
    header, frames = to_frames(others)
    return header, frames, count


def row_frames(
    published: Published,
    positions: Ints,
    columns: Sequence[str],
    arena: Arena,
) -> list[memoryview | Pieces]:
    """Return one frame a column, with the bytes of the rows one after the other.

    Long rows are sent from where they lie; short ones are copied, and those of a spilled table:
    the event loop sends, and would wait for pages of the file.
    """
    table_columns = published.columns()
    plans = []
    for group, lengths in enumerate(table_columns.lengths):
        targets = starts_of(lengths[positions])  # one row after the other
        plans.append(table_columns.copy_plan(group, positions, targets))
    frames: list[memoryview | Pieces] = []
    for name in columns:
        column = table_columns.ragged[name]
        plan = plans[table_columns.group_of[name]]
        if published.spilled is None:
            pieces = plan.source_pieces(column.values, column.width)
            if pieces is not None:
                frames.append(pieces)
                continue
        block = arena.allocate(plan.elements * column.width)
        plan.copy(column.values, block.bytes, column.width)
        frames.append(memoryview(block.buffer()))
    published.release_pages()
    return frames


def write_rows(
    published: Published,
    positions: Ints,
    columns: Sequence[str],
    target: Mapping[str, Any],
    attachments: Attachments,
) -> None:
    """Write the rows into the asker's memory, where ``target`` says (see
    ``ReceiveBuffer.write_target``).

    PeerError for places outside of the asker's segments. The asker alone decides where rows go
    and lays out its result for all sources, so writing them twice, after a request that was
    repeated, gives the same bytes.
    """
    table_columns = published.columns()
    try:
        handles = [unpack_handle(handle) for handle in target["handles"]]
        segments = [attachments.attach(handle) for handle in handles]
        packed_starts = target["starts"]
        starts = []
        for packed in packed_starts:
            starts.append(unpack_ints(packed, 2**48, 2**40)[: len(positions)])
        plans: dict[tuple[int, int], CopyPlan] = {}
        for name, (segment, base, target_group) in zip(columns, target["columns"], strict=True):
            column = table_columns.ragged[name]
            group = table_columns.group_of[name]
            plan = plans.get((group, target_group))
            if plan is None:
                plan = table_columns.copy_plan(group, positions, starts[target_group])
                plans[group, target_group] = plan
            if not isinstance(base, int) or base < 0:
                raise IndexError(f"{base!r} is no place in a segment")
            plan.copy(column.values, segments[segment][base:], column.width)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PeerError(f"refused to write rows: {error!r}") from error
    published.release_pages()
