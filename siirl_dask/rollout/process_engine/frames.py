"""Messages between a worker and its engine's process: plain data in msgpack, and open files, over a
pair of Unix sockets that have no address.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgpack

from siirl_dask.errors import PeerError

_LENGTH = struct.Struct("<Q")
_LARGEST = 2**30
"""Bytes of a message, at most: requests have the bytes of their images, weights travel as files."""
DONE = "done"
FAILED = "failed"
ANSWER = "answer"
ABORT = "abort"
"""Names of messages: a command was carried out, or raised; a question has this answer, or none."""


class ProcessLostError(Exception):
    """The process at the other end of the socket is gone."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    name: str
    value: Any = None
    """Plain data: what msgpack holds."""
    file: int | None = None
    """Descriptor of an open file that came with it, which the receiver closes."""


class MessageSocket:
    """One end of a pair of sockets. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = Lock()

    def send(self, name: str, value: Any = None, file: int | None = None) -> None:
        """Send a message, and with it the descriptor of an open file. ProcessLostError where nobody
        is left to read it; PeerError for one that is too large.
        """
        packed: bytes = msgpack.packb([name, value])
        if len(packed) > _LARGEST:
            raise PeerError(
                f"message {name!r} has {len(packed)} bytes: expected at most {_LARGEST}"
            )
        head = _LENGTH.pack(len(packed))
        try:
            with self._lock:
                if file is not None:
                    sent = socket.send_fds(self._socket, [head], [file])
                    head = head[sent:]
                self._socket.sendall(head + packed)
        except OSError as error:
            raise ProcessLostError(str(error)) from error

    def is_readable(self, seconds: float) -> bool:
        """Wait so long for a message, or the end of the socket; return whether one is there."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def receive(self) -> Frame:
        """Wait for a message. ProcessLostError where none will come; PeerError for anything else."""
        try:
            head, files, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            head += self._exactly(_LENGTH.size - len(head)) if head else b""
        except OSError as error:
            raise ProcessLostError(str(error)) from error
        if not head:
            raise ProcessLostError("the socket was closed")
        for file in files:
            os.set_inheritable(file, False)
        (length,) = _LENGTH.unpack(head)
        if length > _LARGEST:
            raise PeerError(f"received a message of {length} bytes: expected at most {_LARGEST}")
        try:
            value = msgpack.unpackb(self._exactly(length))
        except OSError as error:
            raise ProcessLostError(str(error)) from error
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise PeerError(f"received a message that is no msgpack: {error}") from error
        match value:
            case [str(name), content]:
                return Frame(name, content, files[0] if files else None)
        raise PeerError("received a message of another form: expected a name and a value")

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, length: int) -> bytearray:
        """Return the next ``length`` bytes. ConnectionError where the socket ends before."""
        found = bytearray(length)
        rest = memoryview(found)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise ConnectionError("the socket was closed")
            rest = rest[count:]
        return found
