"""Fetches rows from the workers that have them into their places: from this worker itself, through
shared memory, where it writes them to their places, or in messages, several of them in flight.
``serving`` answers these requests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from siirl_dask.comms.wire import Frame, Pieces, nbytes_of
from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.limits import Budget, BufferLimits, CopyThreads, Traffic
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.receive_buffer import ReceiveBuffer, RowRequest, SourceRows
from siirl_dask.coordinator.databuffer.row_lengths import other_columns_schema
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.messages import (
    Op,
    Reply,
    Request,
    TransitionKey,
    Transport,
    from_frames,
    pack_ints,
)
from siirl_dask.coordinator.transport.peers import gather_or_cancel
from siirl_dask.errors import PeerError

logger = logging.getLogger("siirl_dask.coordinator")
LEAST_IN_FLIGHT = 2
"""Messages per source: one arrives while the other is copied."""
# rounds of messages in flight into which a source's rows are cut: all of a round arrive at the
# same time and are copied afterwards, so with a single round nothing would arrive meanwhile
_ROUNDS = 2
_LEAST_MESSAGE = 2**20  # bytes: rows are cut into no smaller messages
# rows that a source is asked to write at once: their places travel with the request
_MAX_WRITTEN_ROWS = 2**16


class RowFetcher:
    """Fetches one worker's rows. Belongs to the event loop; only copies of rows leave it, for
    ``CopyThreads``.
    """

    def __init__(
        self,
        *,
        worker: str,
        transport: Transport,
        own_published: Callable[[TransitionKey], Awaitable[Published]],
        copy_threads: CopyThreads,
        limits: BufferLimits,
        transport_mode: TransportMode,
        traffic: Traffic,
    ) -> None:
        """``own_published`` waits until this worker has published its rows of a transition, and
        returns them.
        """
        self._worker = worker
        self._transport = transport
        self._own_published = own_published
        self._copy_threads = copy_threads
        self._limits = limits
        self._transport_mode = transport_mode
        self._traffic = traffic
        self._receiving = Budget(limits.memory // 8)
        # sources of this host that turned out not to reach this memory
        self._no_shared_memory: set[str] = set()

    async def fetch(self, buffer: ReceiveBuffer, rows: SourceRows, in_flight: int) -> None:
        """Fetch a source's rows into their places: from this worker itself, through shared
        memory, or in messages.
        """
        if rows.source == self._worker:
            size = buffer.ragged_bytes(rows) + len(rows.positions) * rows.other_row_bytes
            published = await self._own_published(rows.key)
            await self._copy_threads.run(size, buffer.copy_own, rows, published)
        elif buffer.ragged_bytes(rows) and self._shares_memory(rows):
            await self._fetch_by_write(buffer, rows)
        else:
            await self._fetch_by_messages(buffer, rows, in_flight)

    def _shares_memory(self, rows: SourceRows) -> bool:
        """Return whether the source can write into this process's memory. PeerError when it must
        and cannot.
        """
        if self._transport_mode is TransportMode.dask:
            return False
        domain = shared_memory_domain()
        if domain and rows.domain == domain:
            return rows.source not in self._no_shared_memory
        if self._transport_mode is TransportMode.shm:
            raise PeerError(
                f"data.transport=shm, but worker {rows.source!r} shares no memory with "
                f"{self._worker!r}"
            )
        return False

    async def _fetch_by_write(self, buffer: ReceiveBuffer, rows: SourceRows) -> None:
        """Ask the source to write its rows to their places, as many at once as its other columns
        fit into a message.
        """
        rows_in_message = self._limits.message // max(1, rows.other_row_bytes)
        batch_rows = max(1, min(_MAX_WRITTEN_ROWS, rows_in_message))
        remaining = np.arange(len(rows.positions))
        while len(remaining):
            batch = remaining[:batch_rows]
            nbytes = buffer.ragged_bytes(rows, batch)
            request = RowRequest(rows=batch, columns=rows.wanted, others=True, nbytes=nbytes)
            reply = await self._request_rows(rows, request, buffer.write_target(rows, batch))
            if (reason := reply.header.get("cannot map")) is not None:
                if self._transport_mode is TransportMode.shm:
                    raise PeerError(
                        f"data.transport=shm, but worker {rows.source!r} cannot write here: "
                        f"{reason}"
                    )
                logger.warning("rows of worker %r come as messages: %s", rows.source, reason)
                self._no_shared_memory.add(rows.source)
                # all of them: to write some twice does no harm
                await self._fetch_by_messages(buffer, rows, LEAST_IN_FLIGHT)
                return
            done, frames = self._take_others(buffer, rows, request, reply)
            expected = buffer.ragged_bytes(rows, remaining[:done])
            written = reply.header.get("written")
            if frames or written != expected:
                raise PeerError(
                    f"worker {rows.source!r} wrote {written!r} bytes: by the row lengths it told "
                    f"they are {expected}"
                )
            remaining = remaining[done:]
        self._traffic.add_shared(rows.source, buffer.ragged_bytes(rows))

    async def _fetch_by_messages(
        self, buffer: ReceiveBuffer, rows: SourceRows, in_flight: int
    ) -> None:
        """Receive a source's rows in messages, so many in flight at once, each within this
        worker's budget.
        """
        total = buffer.ragged_bytes(rows) + len(rows.positions) * rows.other_row_bytes
        share = max(_LEAST_MESSAGE, total // (_ROUNDS * in_flight))
        requests = buffer.split_into_requests(rows, min(self._limits.message, share))

        async def one_after_the_other() -> None:
            for request in requests:  # one iterator for all: whoever is done takes the next
                async with self._receiving.reserve(request.nbytes):
                    await self._fetch_message(buffer, rows, request)

        await gather_or_cancel(*(one_after_the_other() for _ in range(in_flight)))

    async def _fetch_message(
        self, buffer: ReceiveBuffer, rows: SourceRows, request: RowRequest
    ) -> None:
        """Receive the rows of one request, long ones into their places; where the source sends the
        first of them only, ask for the rest.
        """
        remaining = request
        while len(remaining.rows):
            places = partial(self._places, buffer, rows, remaining)
            reply = await self._request_rows(rows, remaining, None, places)
            done, frames = self._take_others(buffer, rows, remaining, reply)
            if len(frames) != len(remaining.columns):
                raise PeerError(
                    f"worker {rows.source!r} sent {len(frames)} columns: expected "
                    f"{remaining.columns}"
                )
            to_copy: dict[str, Frame] = {}
            for name, frame in zip(remaining.columns, frames, strict=True):
                if not isinstance(frame, Pieces):  # pieces have been received where they belong
                    to_copy[name] = frame
            nbytes = sum(nbytes_of(frame) for frame in to_copy.values())
            await self._copy_threads.run(
                nbytes, buffer.copy_frames, rows, remaining.rows[:done], to_copy
            )
            remaining = replace(remaining, rows=remaining.rows[done:])

    def _places(
        self,
        buffer: ReceiveBuffer,
        rows: SourceRows,
        request: RowRequest,
        header: object,
        sizes: Sequence[int],
    ) -> list[Pieces | None]:
        """Return where the frames of a reply belong. PeerError, before a byte of them has come, for
        other rows or columns than were asked for.
        """
        known_header = header if isinstance(header, dict) else {}
        done, split = _part(rows, request, known_header)
        if len(sizes) != split + len(request.columns):
            raise PeerError(
                f"worker {rows.source!r} sent {len(sizes) - split} columns: expected "
                f"{request.columns}"
            )
        others: list[Pieces | None] = [None] * split
        return others + buffer.places(rows, request.rows[:done], request.columns, sizes[split:])

    async def _request_rows(
        self,
        rows: SourceRows,
        request: RowRequest,
        target: dict[str, Any] | None,
        places: Callable[[object, Sequence[int]], Sequence[Pieces | None]] | None = None,
    ) -> Reply:
        """Ask a source for rows: to write them to ``target``, or without one to send them."""
        positions = pack_ints(rows.positions[request.rows])
        body = {
            "rows": positions,
            "columns": list(request.columns),
            "others": request.others,
            "target": target,
        }
        row_bytes = request.nbytes if target is None else 0
        reply = await self._transport.request(
            rows.source, Request(Op.FETCH, rows.key, body, row_bytes, places)
        )
        self._traffic.add_message(rows.source, reply.nbytes)
        return reply

    def _take_others(
        self, buffer: ReceiveBuffer, rows: SourceRows, request: RowRequest, reply: Reply
    ) -> tuple[int, Sequence[Frame | Pieces]]:
        """Take the other columns out of a reply. Return how many rows it is about, and the
        frames after those.
        """
        done, split = _part(rows, request, reply.header)
        schema = other_columns_schema(buffer.schema, rows.lengths)
        if request.others and len(schema):
            others = Reply(reply.header, reply.frames[:split]).plain_frames()
            table = from_frames(reply.header.get("others", {}), others, schema)
            if table.num_rows != done:
                raise PeerError(
                    f"worker {rows.source!r} gave {table.num_rows} rows instead of {done}"
                )
            buffer.add_others(rows.destinations[request.rows[:done]], table)
        return done, reply.frames[split:]


def _part(rows: SourceRows, request: RowRequest, header: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many of the rows a reply is about, and the number of frames before theirs."""
    done = header.get("rows")
    split = header.get("split")
    match done, split:
        case int(), int() if 0 < done <= len(request.rows) and split >= 0:
            return done, split
    raise PeerError(f"worker {rows.source!r} gave {done!r} of {len(request.rows)} rows")
