"""The format of messages between workers, the same within a host and between hosts.

A message is a prelude (bytes of the head, number of frames, number of the message; little-endian),
the size of each frame (8 bytes each), the head (msgpack) and the frames. Its head is plain data;
bytes in it that are long travel as frames of their own, and an extension type says which. There are
no other types: nothing is unpickled, nothing is decompressed, and every size is checked before
memory is taken for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from reprlib import repr as short
from typing import Any

import msgpack

from siirl_dask.errors import PeerError

VERSION = 3
"""Version of the format. Both sides of a connection name theirs first."""
Frame = memoryview | bytes
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
# as tuples: a union of types is made anew, and compared slowly, for each value of a head
_LISTS = (list, tuple)
_BYTES = (bytes, bytearray, memoryview)
_PLAIN = (str, bytes, int, float, type(None))
_KEYS = (str, int)


class Pieces:
    """A frame that lies in several places of memory: sent from there, or received into them.

    Whoever sends or receives it refers to it until its last byte has moved.
    """

    __slots__ = ("__weakref__", "nbytes", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """``views`` are of single bytes, in the order of the frame."""
        self.views = views
        self.nbytes = sum(view.nbytes for view in views)

    def __bytes__(self) -> bytes:
        return b"".join(self.views)


def nbytes_of(frame: Frame | Pieces) -> int:
    """Return the bytes of a frame."""
    return frame.nbytes if isinstance(frame, Pieces) else memoryview(frame).nbytes


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """Bytes that a message may have."""

    head: int
    frames: int
    number: int | None = None
    """The one number that it may have; None: any."""


REQUEST = MessageBounds(MAX_REQUEST_HEAD, MAX_REQUEST_FRAMES)
GREETING = int.from_bytes(b"siirl\0\0\3", "little")
"""Number of the first messages each way: who speaks anything else is known by 16 bytes."""
HANDSHAKE = MessageBounds(2**12, 0, GREETING)
PROOF = MessageBounds(2**7, 0, GREETING)
"""The second message each way, where a connection has a secret."""


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
    frames: Sequence[Frame | Pieces]


def pack(number: int, head: object, frames: Sequence[Frame | Pieces] = ()) -> list[memoryview]:
    """Return the buffers of a message: the last ones are the frames themselves, not copies.

    TypeError or ValueError where the head is no plain data.
    """
    parts = [_views(frame) for frame in frames]
    outlined: list[memoryview] = []
    packed = msgpack.packb([len(parts), _outlined(head, outlined, len(parts))])
    parts += [[view] for view in outlined]
    prelude = PRELUDE.pack(len(packed), len(parts), number)
    if not parts:
        return [memoryview(prelude + packed)]
    sizes = struct.pack(f"<{len(parts)}Q", *(sum(view.nbytes for view in views) for views in parts))
    top = prelude + sizes + packed
    return [memoryview(top), *(view for views in parts for view in views)]


def _views(frame: Frame | Pieces) -> Sequence[memoryview]:
    return frame.views if isinstance(frame, Pieces) else [memoryview(frame).cast("B")]


def _outlined(value: Any, frames: list[memoryview], before: int) -> Any:
    """Return ``value`` with an extension type in place of long bytes, which are appended to
    ``frames``; ``before`` is the number of frames before these.
    """
    if isinstance(value, dict):
        return {key: _outlined(item, frames, before) for key, item in value.items()}
    if isinstance(value, _LISTS):
        return [_outlined(item, frames, before) for item in value]
    if isinstance(value, _BYTES) and memoryview(value).nbytes >= _LONG:
        frames.append(memoryview(value).cast("B"))
        return msgpack.ExtType(_FRAME, _INDEX.pack(before + len(frames) - 1))
    return value


def read_prelude(data: bytes | bytearray, bounds: MessageBounds) -> Prelude:
    """Return the prelude at the start of ``data``. PeerError for a head or a number of frames
    beyond the bounds.
    """
    head, frames, number = PRELUDE.unpack_from(data)
    if bounds.number is not None and number != bounds.number:
        raise PeerError("received bytes that are no handshake of the format of rows")
    most_frames = min(_MAX_FRAMES, bounds.frames)
    if head > bounds.head or frames > most_frames:
        raise PeerError(
            f"received a message with a head of {head} bytes and {frames} frames: expected at most "
            f"{bounds.head} bytes and {most_frames} frames"
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


def read_message(
    prelude: Prelude, top: bytes | bytearray, frames: Sequence[Frame | Pieces]
) -> Message:
    """Return the message that ``pack`` packed. PeerError when its head is no plain data, or does
    not refer to each frame beyond the message's own once.
    """
    used: set[int] = set()

    def frame(kind: int, packed_index: bytes) -> bytes:
        if kind != _FRAME or len(packed_index) != _INDEX.size:
            raise PeerError(f"received a value of extension type {kind}: expected plain data")
        index = _INDEX.unpack(packed_index)[0]
        if index in used:  # each reference takes memory for a copy
            raise PeerError(f"received two values that are frame {index}: expected one")
        used.add(index)
        return bytes(frames[index])

    packed = memoryview(top)[_SIZE * prelude.frames :]
    try:
        own, head = msgpack.unpackb(packed, strict_map_key=False, ext_hook=frame)
        if not isinstance(own, int) or not 0 <= own <= len(frames):
            raise ValueError(f"{own!r} frames of {len(frames)}")
        if used != set(range(own, len(frames))):
            raise ValueError(f"values in {len(used)} frames: expected frames {own} and after")
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
            if isinstance(item, _PLAIN):
                continue
            if isinstance(item, dict):
                below.extend(item.values())
                if not all(isinstance(key, _KEYS) for key in item):
                    raise TypeError("keys that are neither text nor numbers")
            elif isinstance(item, list):
                below.extend(item)
            else:
                raise TypeError(f"a value of type {type(item).__name__}")
        level = below
