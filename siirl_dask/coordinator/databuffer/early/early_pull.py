"""Early rows, at a target: it asks each source for finished rows while their table is not whole,
one message at a time.

They are held as they arrived until the owners of all rows are known. Those that are this worker's
are then copied to their places instead of being fetched; the others are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from siirl_dask.comms.wire import Frame
from siirl_dask.coordinator.databuffer.limits import Allowance, Traffic
from siirl_dask.coordinator.databuffer.ragged import element_width
from siirl_dask.coordinator.databuffer.row_lengths import MAX_ROW_ELEMENTS
from siirl_dask.coordinator.transport.messages import (
    Op,
    Reply,
    Request,
    TransitionKey,
    Transport,
    unpack_ints,
)
from siirl_dask.errors import PeerError, SiirlError
from siirl_dask.planner import Edge
from siirl_dask.tables import Ints

logger = logging.getLogger("siirl_dask.coordinator")
_MAX_ROWS = 2**20  # rows in a message: a peer that sends more of them, all empty, is refused
_MAX_ROW_ID = 2**62
# times the bytes that are worth a message: a message of long rows may have so many
_MAX_MESSAGE = 64


@dataclass(frozen=True, slots=True)
class EarlyBatch:
    """Rows that arrived in one message."""

    row_ids: Ints
    """[rows] in the order in which they arrived."""
    lengths: Mapping[str, Ints]
    """[rows] elements, by column."""
    frames: Mapping[str, Frame]
    """Bytes of the rows one after the other, by column."""

    @property
    def nbytes(self) -> int:
        return sum(memoryview(frame).nbytes for frame in self.frames.values())


class EarlyPull:
    """Rows of one edge and iteration that arrive early at this worker. Belongs to the event loop.

    ``sources`` are asked for ``columns``; what arrives counts against ``allowance`` until it is
    dropped.
    """

    def __init__(
        self,
        *,
        edge: Edge,
        key: TransitionKey,
        target: int,
        sources: Sequence[str],
        columns: Sequence[str],
        transport: Transport,
        traffic: Traffic,
        allowance: Allowance,
        message_bytes: int,
    ) -> None:
        self._key = key
        self._target = target
        self._widths = {name: element_width(edge.schema.field(name).type) or 0 for name in columns}
        self._transport = transport
        self._traffic = traffic
        self._allowance = allowance
        share = allowance.limit // (2 * max(1, len(sources)))
        self._limit = max(1, min(_MAX_MESSAGE * message_bytes, share))
        self._batches: dict[str, list[EarlyBatch]] = {source: [] for source in sources}
        self._asking = [asyncio.create_task(self._ask(source)) for source in sources]

    async def finish(self) -> Mapping[str, Sequence[EarlyBatch]]:
        """Return what has arrived, by source. All sources have published, so each soon answers
        that it is done.
        """
        done, _ = await asyncio.wait(self._asking)
        for task in done:
            # it is when the run is stopped; whoever waits learns of that elsewhere
            if not task.cancelled():
                task.result()
        return self._batches

    def drop(self) -> int:
        """Ask no more, free what has arrived, and return its bytes."""
        for task in self._asking:
            task.cancel()
        nbytes = sum(batch.nbytes for batches in self._batches.values() for batch in batches)
        self._allowance.give(nbytes)
        self._batches = {}
        return nbytes

    async def _ask(self, source: str) -> None:
        """Ask a source for message after message until it has no more, or no memory is left for
        another.
        """
        number = 0
        try:
            while self._allowance.take(self._limit):
                batch = None
                try:
                    batch = await self._next(source, number)
                finally:
                    received = 0 if batch is None else batch.nbytes
                    self._allowance.give(self._limit - received)
                if batch is None:
                    return
                self._batches[source].append(batch)
                number += 1
        except (
            SiirlError
        ) as error:  # no failure: whatever has not arrived is pulled with the other rows
            logger.info("rows of worker %r come when their table is whole: %s", source, error)

    async def _next(self, source: str, number: int) -> EarlyBatch | None:
        """Return the source's next message; None when it has no more."""
        body = {"target": self._target, "number": number, "limit": self._limit}
        reply = await self._transport.request(source, Request(Op.EARLY, self._key, body))
        self._traffic.add_message(source, reply.nbytes)
        return self._read(source, reply) if reply.header.get("rows") else None

    def _read(self, source: str, reply: Reply) -> EarlyBatch:
        """Return the rows in a reply. PeerError when it is malformed or larger than was asked
        for.
        """
        row_ids = unpack_ints(reply.header.get("rows"), _MAX_ROW_ID, _MAX_ROWS)
        announced = reply.header.get("lengths")
        if not isinstance(announced, list | tuple) or not len(announced) == len(
            reply.frames
        ) == len(self._widths):
            raise PeerError(
                f"worker {source!r} sent {len(reply.frames)} early columns: expected "
                f"{[*self._widths]}"
            )
        if reply.nbytes > self._limit or len(np.unique(row_ids)) < len(row_ids):
            raise PeerError(
                f"worker {source!r} sent {reply.nbytes} bytes of early rows: expected "
                f"{self._limit} at most"
            )
        lengths = {
            name: unpack_ints(values, MAX_ROW_ELEMENTS, len(row_ids))
            for name, values in zip(self._widths, announced, strict=True)
        }
        frames = dict(zip(self._widths, reply.plain_frames(), strict=True))
        for name, width in self._widths.items():
            size = memoryview(frames[name]).nbytes
            if len(lengths[name]) != len(row_ids) or int(lengths[name].sum()) * width != size:
                raise PeerError(
                    f"worker {source!r} sent {size} bytes of early {name!r}: its lengths say "
                    "otherwise"
                )
        return EarlyBatch(row_ids, lengths, frames)
