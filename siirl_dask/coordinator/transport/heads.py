"""The head of a message: its number, what it says, and the sizes of the frames behind it, packed with msgpack.

On the wire a message is the length of its head (4 bytes, little-endian), the head and the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgpack

from siirl_dask.coordinator.host import physical_memory
from siirl_dask.coordinator.transport.frames import Frame
from siirl_dask.errors import PeerError

LENGTH = struct.Struct("<I")
_MAX_HEAD_BYTES = 64 * 2**20


def pack_message(number: int, head: object, frames: Sequence[Frame]) -> list[memoryview | bytes]:
    """Return the buffers to send one after the other: views of the frames, and what goes before them."""
    views = [memoryview(frame).cast("B") for frame in frames]
    packed: bytes = msgpack.packb([number, head, [view.nbytes for view in views]])
    return [LENGTH.pack(len(packed)), packed, *views]


def read_length(packed: bytes | bytearray | memoryview) -> int:
    """Return the length of the head that follows. PeerError when it is too long."""
    length: int = LENGTH.unpack_from(packed)[0]
    if length > _MAX_HEAD_BYTES:
        raise PeerError(f"received the head of a message of {length} bytes: expected at most {_MAX_HEAD_BYTES}")
    return length


def read_head(packed: bytes | bytearray | memoryview) -> tuple[int, object, list[int]]:
    """Return the number, the head and the sizes of the frames. PeerError when ``packed`` is no head of a message."""
    try:
        number, head, sizes = msgpack.unpackb(packed, strict_map_key=False)
        valid = isinstance(number, int) and all(isinstance(size, int) and size >= 0 for size in sizes)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(f"received bytes that are no message: {error!r}") from error
    if not valid or sum(sizes) > physical_memory():
        raise PeerError(f"received frames of {str(sizes)[:80]} bytes: more than this machine's memory")
    return number, head, sizes
