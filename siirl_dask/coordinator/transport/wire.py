"""The format of messages between workers, the same over Unix sockets within a host and over streams
between hosts.

A message is a prelude (bytes of the head, number of frames, number of the message; little-endian),
the size of each frame (8 bytes each), the head (msgpack) and the frames. Its head is plain data;
bytes in it that are long travel as frames of their own, and an extension type says which. There are
no other types: nothing is unpickled, nothing is decompressed, and every size is checked before
memory is taken for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from reprlib import repr as short
from typing import Any

import msgpack
import pyarrow as pa

from siirl_dask.errors import DataError, PeerError

# Turns an Arrow table into a small header and its own buffers, and back: no pickle, and no copy on
# the way out.
#
# A received table is checked before it is used: the receiver names the schema, and Arrow validates
# every offset.


Frame = memoryview | bytes
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
    for field in schema:
        if not _can_move(field.type):
            raise DataError(
                f"column {field.name!r} has type {field.type}, which cannot move between workers: "
                "expected numbers, booleans, strings, binary, times, or lists, maps and structs of "
                "them; cast it"
            )


def _can_move(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _can_move(kind.value_type)
    if types.is_map(kind):
        return _can_move(kind.key_type) and _can_move(kind.item_type)
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
    children = [_build(field.type, nodes, frames) for field in _child_fields(kind)]
    return pa.Array.from_buffers(kind, length, buffers, nulls, children=children or None)


def _child_fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(index) for index in range(kind.num_fields)]


def _is_list_like(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_map(kind)
    )


PRELUDE = struct.Struct("<IIQ")
MAX_REQUEST_HEAD = 2**20
"""Bytes of a request's head. A list of empty lists takes 64 times its bytes once it is unpacked."""
MAX_REPLY_HEAD = 2**23
"""Bytes of a reply's head, such as one with statistics of a thousand sources."""
MAX_REQUEST_FRAMES = 2**26
"""Bytes of all frames of a request: numbers of rows, and results of stolen work."""
_MAX_FRAMES = 2**16
_MAX_DEPTH = 32  # of lists and mappings within each other
_LONG = 2**10  # bytes from which a value of the head travels as a frame
_FRAME = 1  # extension type: the index of the frame that holds the value
_INDEX = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """Bytes that a message may have."""

    head: int
    frames: int


REQUEST = MessageBounds(MAX_REQUEST_HEAD, MAX_REQUEST_FRAMES)


@dataclass(frozen=True, slots=True)
class Prelude:
    """The fixed beginning of a message: it says how much follows."""

    head: int
    """Bytes of the head."""
    frames: int
    """Number of frames."""
    number: int

    @property
    def top(self) -> int:
        """Bytes of the sizes and the head, which follow."""
        return _SIZE * self.frames + self.head


_SIZE = 8  # bytes of a frame's size


@dataclass(frozen=True, slots=True)
class Message:
    """A message that has arrived."""

    number: int
    head: object
    """Plain data: numbers, text, bytes, lists, mappings."""
    frames: Sequence[Frame]


def pack(number: int, head: object, frames: Sequence[Frame] = ()) -> list[Frame]:
    """Return the buffers of a message: the last ones are the frames themselves, not copies."""
    views = [memoryview(frame).cast("B") for frame in frames]
    own = len(views)
    packed = msgpack.packb([own, _outlined(head, views)])
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [PRELUDE.pack(len(packed), len(views), number) + sizes + packed, *views]


def _outlined(value: Any, frames: list[memoryview]) -> Any:
    """Return ``value`` with an extension type in place of long bytes, which are appended to
    ``frames``.
    """
    if isinstance(value, dict):
        return {key: _outlined(item, frames) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_outlined(item, frames) for item in value]
    if isinstance(value, bytes | bytearray | memoryview) and memoryview(value).nbytes >= _LONG:
        frames.append(memoryview(value).cast("B"))
        return msgpack.ExtType(_FRAME, _INDEX.pack(len(frames) - 1))
    return value


def read_prelude(data: bytes | bytearray, bounds: MessageBounds) -> Prelude:
    """Return the prelude at the start of ``data``. PeerError for a head or a number of frames
    beyond the bounds.
    """
    head, frames, number = PRELUDE.unpack_from(data)
    if head > bounds.head or frames > _MAX_FRAMES:
        raise PeerError(
            f"received a message with a head of {head} bytes and {frames} frames: expected at most "
            f"{bounds.head} bytes and {_MAX_FRAMES} frames"
        )
    return Prelude(head, frames, number)


def read_sizes(prelude: Prelude, top: bytes | bytearray, bounds: MessageBounds) -> tuple[int, ...]:
    """Return the sizes of the frames, from what follows the prelude. PeerError when they are
    beyond the bounds.
    """
    sizes = struct.unpack_from(f"<{prelude.frames}Q", top)
    if sum(sizes) > bounds.frames:
        raise PeerError(
            f"received frames of {sum(sizes)} bytes together: expected at most {bounds.frames}"
        )
    return sizes


def split(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return the frames that lie one after the other in ``body``."""
    return [body[first:last] for first, last in pairwise(accumulate(sizes, initial=0))]


def read_message(prelude: Prelude, top: bytes, frames: Sequence[Frame]) -> Message:
    """Return the message that ``pack`` packed. PeerError when its head is no plain data."""

    def frame(kind: int, index: bytes) -> bytes:
        if kind != _FRAME or len(index) != _INDEX.size:
            raise PeerError(f"received a value of extension type {kind}: expected plain data")
        return bytes(frames[_INDEX.unpack(index)[0]])

    packed = memoryview(top)[_SIZE * prelude.frames :]
    try:
        own, head = msgpack.unpackb(packed, strict_map_key=False, ext_hook=frame)
        if not isinstance(own, int) or not 0 <= own <= len(frames):
            raise ValueError(f"{own!r} frames of {len(frames)}")
        _check_plain(head)
    except (
        ValueError,
        TypeError,
        IndexError,
        RecursionError,
        msgpack.exceptions.UnpackException,
    ) as error:
        raise PeerError(
            f"received bytes that are no message: {type(error).__name__}: {str(error)[:120]}"
        ) from None
    return Message(prelude.number, head, frames[:own])


def read_messages(data: object, bounds: MessageBounds, at_most: int) -> list[Message]:
    """Return the messages that lie one after the other in ``data``. PeerError for anything else,
    and for more.
    """
    if not isinstance(data, bytes):
        raise PeerError(f"received {short(data)}: expected bytes")
    messages: list[Message] = []
    at = 0
    while at < len(data):
        if len(messages) == at_most or len(data) - at < PRELUDE.size:
            raise PeerError(
                f"received {len(data)} bytes: expected {at_most} whole messages at most"
            )
        prelude = read_prelude(data[at : at + PRELUDE.size], bounds)
        start = at + PRELUDE.size + prelude.top
        top = data[at + PRELUDE.size : start]
        if len(top) < prelude.top:
            raise PeerError("received a message that is cut off")
        sizes = read_sizes(prelude, top, bounds)
        at = start + sum(sizes)
        if at > len(data):
            raise PeerError("received a message that is cut off")
        messages.append(read_message(prelude, top, split(memoryview(data)[start:at], sizes)))
    return messages


def _check_plain(value: object) -> None:
    """Raise ValueError for values within each other more than 32 times, TypeError for any that
    is no plain data.
    """
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"values within values more than {_MAX_DEPTH} times")
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
                if not all(isinstance(key, str | int) for key in item):
                    raise TypeError("keys that are neither text nor numbers")
            elif isinstance(item, list):
                below.extend(item)
            elif not (item is None or isinstance(item, str | bytes | int | float)):
                raise TypeError(f"a value of type {type(item).__name__}")
        level = below
