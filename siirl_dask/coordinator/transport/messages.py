"""The messages between workers: requests, replies, the protocol of whatever carries them from name
to name, and the frames of a table.

A table becomes a small header and its own buffers, and a table again: no pickle, and no copy on the
way out. A received table is checked before it is used: the receiver names the schema, and Arrow
validates every offset.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from reprlib import repr as short
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from siirl_dask.comms.wire import MAX_REPLY_HEAD, Frame, Message, MessageBounds, Pieces, nbytes_of
from siirl_dask.errors import Aborted, DataError, PeerError, SiirlError
from siirl_dask.tables import Ints

logger = logging.getLogger("siirl_dask.coordinator")
_MAX_REPLY = 2**28  # bytes of frames, beyond those of the rows that are asked for


@dataclass(frozen=True, slots=True)
class TransitionKey:
    """Names what the sources of one edge published in one iteration of one run.

    The table under a key never changes once it is there, so a read can always be repeated: after a
    timeout, after a pull that was cancelled, or when nobody knows whether a message arrived.
    """

    run: str
    sequence: int
    edge: str
    """``phase/edge``, or ``phase/edge/part`` where a table is published in parts."""


class Op(StrEnum):
    """Kinds of requests. All but ACK, STEAL and RETURN are reads, and may be repeated."""

    SUBTREE_STATISTICS = "subtree_statistics"
    """Statistics of the rows of a source and of all sources below it in the edge's tree."""
    ALL_STATISTICS = "all_statistics"
    """Statistics of all rows of an edge."""
    ROW_LENGTHS = "row_lengths"
    """Elements of each of the rows named, by offset group."""
    FETCH = "fetch"
    """Bytes of the rows named, in the reply or written straight into the asker's memory."""
    EARLY = "early"
    """Rows that a source has finished and that will probably be the asker's, while their table
    is not whole."""
    PASSED_ON = "passed_on"
    """Lengths of the rows that the peer took from other hosts for the targets on its own."""
    ACK = "ack"
    """The number of rows that have arrived and will not be asked for again; the source may free
    them."""
    STEAL = "steal"
    """Items of a node's work that the peer has not begun; the asker computes them."""
    RETURN = "return"
    """Results of stolen items, for the worker that they were stolen from."""
    STORE = "store"
    """Port of the process groups' store."""
    PING = "ping"
    """A sign of life."""


NOT_REPEATABLE = frozenset({Op.ACK, Op.STEAL, Op.RETURN})


@dataclass(frozen=True, slots=True)
class Request:
    """A question to a peer. ``body`` is plain data (numbers, text, bytes, lists, mappings) that
    the receiver checks.
    """

    op: str
    key: TransitionKey
    body: Mapping[str, Any] = field(default_factory=dict)
    row_bytes: int = 0
    """Bytes of rows that the reply will have; one with much more is refused. This is not sent."""
    places: Callable[[object, Sequence[int]], Sequence[Pieces | None]] | None = None
    """Where frames of the reply are received, if the carrier can, by its head and their sizes: see
    ``siirl_dask.comms.rows_comm.Places``. This is not sent."""

    @property
    def reply_bounds(self) -> MessageBounds:
        return MessageBounds(MAX_REPLY_HEAD, _MAX_REPLY + self.row_bytes)

    def pack(self) -> list[Any]:
        return [str(self.op), self.key.sequence, self.key.edge, dict(self.body)]


def read_request(run: str, packed: object) -> Request:
    """Return the request that ``Request.pack`` packed. PeerError when ``packed`` is none."""
    match packed:
        case [str(op), int(sequence), str(edge), dict(body)]:
            return Request(op, TransitionKey(run, sequence, edge), body)
    raise PeerError(f"received {short(packed)}, which is no request")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: a header of plain data, and frames of raw bytes."""

    header: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[Frame | Pieces] = ()
    """Pieces are sent from where they lie, and have been received into their places."""

    @staticmethod
    def of(message: Message) -> Reply:
        """Return the reply that a message holds. PeerError when it is a refusal, with the peer's
        words.
        """
        if not isinstance(message.head, dict):
            refusal = message.head if isinstance(message.head, str) else "an answer that is none"
            raise PeerError(refusal)
        return Reply(message.head, message.frames)

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.frames))

    def plain_frames(self) -> list[Frame]:
        """Return the frames, each in one piece."""
        return [bytes(frame) if isinstance(frame, Pieces) else frame for frame in self.frames]


Handler = Callable[[Request], Awaitable[Reply]]


async def answer_to(
    packed: object, run: str, handler: Handler
) -> tuple[object, Sequence[Frame | Pieces]]:
    """Return the head and the frames of the message that answers a request. Aborted when the run
    is being stopped.
    """
    try:
        reply = await handler(read_request(run, packed))
    except Aborted:
        raise
    except SiirlError as error:
        return str(error), ()  # a head of text is a refusal
    except Exception:
        logger.exception("a request of run %s failed", run)
        return "it failed on a bug: see the worker's log", ()
    return reply.header, reply.frames


class Transport(Protocol):
    """Carries a request to a worker, by name, and its reply back. PeerError names a peer that is
    gone, stalls or refuses.
    """

    async def request(self, worker: str, request: Request) -> Reply: ...


def pack_ints(values: Ints) -> bytes:
    """Return the numbers as little-endian int64."""
    return np.ascontiguousarray(values, "<i8").tobytes()


def unpack_ints(value: object, below: int, max_count: int) -> Ints:
    """Return the numbers that ``pack_ints`` packed. PeerError unless they are at most
    ``max_count``, each from 0 to ``below - 1``.
    """
    if not isinstance(value, bytes | bytearray | memoryview) or memoryview(value).nbytes % 8:
        raise PeerError(f"received {str(value)[:40]!r} where numbers were expected")
    numbers = np.frombuffer(value, "<i8").astype(np.int64)
    if len(numbers) > max_count:
        raise PeerError(f"received {len(numbers)} numbers where at most {max_count} were expected")
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= below):
        raise PeerError(
            f"received numbers from {numbers.min()} to {numbers.max()}: expected 0 to {below - 1}"
        )
    return numbers


_LEAVES = (
    pa.types.is_primitive,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)


def check_types(schema: pa.Schema) -> None:
    """Raise DataError naming the first column whose type cannot move between workers."""
    for column in schema:
        if not _can_move(column.type):
            raise DataError(
                f"column {column.name!r} has type {column.type}, which cannot move between workers: "
                "expected numbers, booleans, strings, binary, times, or lists, maps and structs of "
                "them; cast it"
            )


def _can_move(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _can_move(kind.value_type)
    if types.is_map(kind):
        if not _can_move(kind.key_type):
            return False
        return _can_move(kind.item_type)
    if types.is_struct(kind):
        return all(_can_move(field.type) for field in kind)
    return any(is_leaf(kind) for is_leaf in _LEAVES)


def to_frames(table: pa.Table) -> tuple[dict[str, Any], list[Frame]]:
    """Return a header of plain data, and frames that are views of the table's own buffers."""
    frames: list[Frame] = []
    nodes: list[list[int]] = []
    for column in table.columns:
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        _flatten(array, nodes, frames)
    return {"rows": table.num_rows, "nodes": nodes}, frames


def _flatten(array: pa.Array, nodes: list[list[int]], frames: list[Frame]) -> None:
    """Append one node ``[length, nulls, frame index or -1 ...]`` for the array and for each
    child, depth first.
    """
    # a slice, whose buffers are those of its whole parent: this copies the slice alone
    if array.offset != 0:
        array = array.take(pa.array(range(len(array)), pa.int64()))
    children = list(_children(array))
    own = array.buffers()[: array.type.num_buffers]
    node = [len(array), array.null_count]
    for buffer in own:
        node.append(-1 if buffer is None else len(frames))
        if buffer is not None:
            frames.append(memoryview(buffer))
    nodes.append(node)
    for child in children:
        _flatten(child, nodes, frames)


def _children(array: pa.Array) -> Iterator[pa.Array]:
    kind = array.type
    if _is_list_like(kind):
        yield array.values
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield array.field(index)


def from_frames(header: dict[str, Any], frames: Sequence[Frame], schema: pa.Schema) -> pa.Table:
    """Return the table over the received buffers. PeerError for anything that is not a table of
    ``schema``.
    """
    try:
        nodes = iter(header["nodes"])
        arrays = [_build(field.type, nodes, frames) for field in schema]
        if next(nodes, None) is not None:
            raise ValueError("more columns than expected")
        for name, array in zip(schema.names, arrays, strict=True):
            if len(array) != header["rows"]:
                raise ValueError(
                    f"column {name!r} has {len(array)} rows instead of {header['rows']}"
                )
            array.validate(full=True)
        return pa.table(arrays, schema=schema)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        OverflowError,
        StopIteration,
        pa.ArrowException,
    ) as error:
        raise PeerError(
            f"received frames that are no table of {schema.names}: {error!r}"
        ) from error


def _build(kind: pa.DataType, nodes: Iterator[Sequence[int]], frames: Sequence[Frame]) -> pa.Array:
    length, nulls, *indices = next(nodes)
    if length < 0 or nulls < 0 or nulls > length or len(indices) != kind.num_buffers:
        raise ValueError(f"bad node for type {kind}")
    if any(not -1 <= index < len(frames) for index in indices):
        raise ValueError(f"frame out of range for type {kind}")
    buffers = [None if index == -1 else pa.py_buffer(frames[index]) for index in indices]
    children = []
    for index in range(kind.num_fields):
        children.append(_build(kind.field(index).type, nodes, frames))
    return pa.Array.from_buffers(kind, length, buffers, nulls, children=children or None)


def _is_list_like(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_map(kind)
    )
