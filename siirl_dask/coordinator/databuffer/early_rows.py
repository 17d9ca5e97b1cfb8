"""Early rows, at their source: rows that a node has finished while it still makes others, for
targets to fetch.

Each row waits for the target that it prefers. What nobody has fetched when the whole table is
published is dropped, and travels with the rest.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.comms.wire import Frame
from siirl_dask.coordinator.databuffer.limits import Allowance
from siirl_dask.coordinator.databuffer.ragged import RaggedColumn, as_ragged
from siirl_dask.coordinator.layout.balance import preferred_targets
from siirl_dask.coordinator.transport.messages import Reply, pack_ints
from siirl_dask.errors import NodeError, PeerError
from siirl_dask.planner import Edge
from siirl_dask.schema import GROUP_ID, ROW_ID

# times the bytes that are worth a message: its time on a link delays what is urgent
_FULL_MESSAGE = 16
_Fingerprint = tuple[int, int]  # elements of a row in a column, and the checksum of their bytes


@dataclass(slots=True)
class _Queue:
    """Rows that wait for one target."""

    rows: deque[tuple[int, Mapping[str, RaggedColumn], int]] = field(default_factory=deque)
    """Row id, its value in each column, bytes."""
    nbytes: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    """Messages that the target has asked for."""
    last: Reply | None = None
    """The latest of them, held until the next is asked for: a request may be repeated."""


class EarlyRows:
    """Rows of one edge and iteration that this source has finished. Belongs to the event loop.

    Args:
        source: The worker's index among the edge's sources.
        columns: Columns that travel early.
        targets: Indices of the targets that may ask.
        message_bytes: Bytes of waiting rows that are worth a message.
        allowance: Memory for rows that wait.
    """

    def __init__(
        self,
        *,
        edge: Edge,
        source: int,
        columns: Sequence[str],
        targets: Collection[int],
        message_bytes: int,
        allowance: Allowance,
    ) -> None:
        self._edge = edge
        self._source = source
        self._columns = columns
        self._message_bytes = message_bytes
        self._allowance = allowance
        self._queues = {target: _Queue() for target in targets}
        self._fingerprints: dict[int, dict[str, _Fingerprint]] = {}
        """Fingerprints of the rows that were offered, by row id and column."""
        self._closed = False

    def add(self, table: pa.Table) -> None:
        """Take finished rows. Those that prefer a target which asks for none, and those beyond the
        allowance, are left to travel with the whole table.
        """
        if self._closed:
            return
        ids = table[ROW_ID].to_numpy()
        sources = np.full(len(ids), self._source)
        preferred = preferred_targets(table[GROUP_ID].to_numpy(), sources, self._edge).tolist()
        for at, (row, target) in enumerate(zip(ids.tolist(), preferred, strict=True)):
            values = {
                name: as_ragged(table[name].slice(at, 1).combine_chunks()) for name in self._columns
            }
            known = {name: value for name, value in values.items() if value is not None}
            nbytes = 0
            for value in known.values():
                nbytes += int(value.lengths[0]) * value.width
            queue = self._queues.get(target)
            if queue is None or len(known) < len(values) or not self._allowance.take(nbytes):
                continue
            self._fingerprints[row] = {
                name: _fingerprint(value.values, value) for name, value in known.items()
            }
            queue.rows.append((row, known, nbytes))
            queue.nbytes += nbytes
            if queue.nbytes >= self._message_bytes:
                queue.ready.set()

    async def answer(self, body: Mapping[str, Any]) -> Reply:
        """Return the next rows for a target as soon as they are worth a message; an empty reply
        when there are no more.

        The body has the target, the number of the message, and the limit of its bytes. PeerError
        where it has not.
        """
        target = body.get("target")
        number = body.get("number")
        limit = body.get("limit")
        queue = self._queues.get(target) if isinstance(target, int) else None
        if queue is None or not isinstance(number, int) or not isinstance(limit, int) or limit < 1:
            raise PeerError(
                f"target {target!r} asked for message {number!r} of early rows, at most {limit!r} "
                "bytes"
            )
        while not self._closed:
            if number == queue.sent - 1 and queue.last is not None:
                return queue.last
            if number != queue.sent:
                raise PeerError(
                    f"asked for message {number} of early rows: expected {queue.sent - 1} or "
                    f"{queue.sent}"
                )
            if queue.last is not None:
                self._allowance.give(queue.last.nbytes)
                queue.last = None
            rows = self._take(queue, limit) if queue.ready.is_set() else []
            if rows:
                queue.last = _pack(rows, self._columns)
                queue.sent += 1
                return queue.last
            await queue.ready.wait()
        return Reply({"rows": b""})

    def close(self) -> None:
        """Send no more, and drop what waits."""
        self._closed = True
        for queue in self._queues.values():
            self._allowance.give(queue.nbytes)
            queue.rows.clear()
            queue.nbytes = 0
            if queue.last is not None:
                self._allowance.give(queue.last.nbytes)
                queue.last = None
            queue.ready.set()

    def check(self, ids: Sequence[int], columns: Mapping[str, RaggedColumn]) -> None:
        """Compare the rows that were offered early with the published ones. NodeError when one
        differs or is missing.

        ``columns`` are the published ones, as far as they are variable-length; their rows have the
        ``ids``.
        """
        node = self._edge.early.node if self._edge.early else self._edge.source
        place = {row: at for at, row in enumerate(ids)}
        for row, fingerprints in self._fingerprints.items():
            at = place.get(row)
            for name, fingerprint in fingerprints.items():
                # it has nulls in other rows: then no target uses what arrived early
                if name not in columns:
                    continue
                if at is None or _fingerprint_at(columns[name], at) != fingerprint:
                    raise NodeError(
                        f"node {node!r} handed over row {row} early and gave another {name!r} for "
                        "it in its table: a row that is handed over (Context.hand_over) must be "
                        "in the table unchanged"
                    )

    def _take(self, queue: _Queue, limit: int) -> list[tuple[int, Mapping[str, RaggedColumn]]]:
        """Remove the next rows for a message that fit into ``limit``; drop rows that never do."""
        taken: list[tuple[int, Mapping[str, RaggedColumn]]] = []
        size = 0
        while queue.rows and size < _FULL_MESSAGE * self._message_bytes:
            row, values, nbytes = queue.rows[0]
            if nbytes <= limit < size + nbytes:
                break
            queue.rows.popleft()
            queue.nbytes -= nbytes
            if nbytes > limit:
                self._allowance.give(nbytes)
                continue
            taken.append((row, values))
            size += nbytes
        if queue.nbytes < self._message_bytes:
            queue.ready.clear()
        return taken


def _pack(rows: Sequence[tuple[int, Mapping[str, RaggedColumn]]], columns: Sequence[str]) -> Reply:
    """Return a reply of one frame a column, the rows one after the other."""
    lengths = {}
    frames: list[Frame] = []
    for name in columns:
        cells = [values[name] for _, values in rows]
        lengths[name] = np.array([cell.lengths[0] for cell in cells], np.int64)
        frames.append(np.concatenate([_row_bytes(cell) for cell in cells]).data)
    header = {
        "rows": pack_ints(np.array([row for row, _ in rows], np.int64)),
        "lengths": [pack_ints(lengths[name]) for name in columns],
    }
    return Reply(header, frames)


def _row_bytes(value: RaggedColumn) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return value.values[: int(value.lengths[0]) * value.width]


def _fingerprint(values: np.ndarray[Any, np.dtype[np.uint8]], column: RaggedColumn) -> _Fingerprint:
    length = int(column.lengths[0])
    return length, zlib.crc32(values[: length * column.width].data)


def _fingerprint_at(column: RaggedColumn, at: int) -> _Fingerprint:
    first = int(column.starts[at]) * column.width
    length = int(column.lengths[at])
    values = column.values[first : first + length * column.width]
    return length, zlib.crc32(values.data)
