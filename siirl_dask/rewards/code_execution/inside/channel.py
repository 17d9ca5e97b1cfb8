"""Messages between a test and the program that it calls: eight bytes of length, then JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any


class Channel:
    """Sends and receives messages over two files. The other side may send anything: EOFError for
    all but a message.
    """

    def __init__(self, incoming: int, outgoing: int, most: int) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._most = most

    def send(self, message: Any) -> None:
        """Send a message. ValueError when it is longer than the other side would read."""
        data = json.dumps(message).encode()
        if len(data) > self._most:
            raise ValueError(f"a message of {len(data)} bytes: expected at most {self._most}")
        left = memoryview(struct.pack("<Q", len(data)) + data)
        while left:
            left = left[os.write(self._outgoing, left) :]

    def receive(self) -> Any:
        """Return the next message."""
        size = struct.unpack("<Q", self._read(8))[0]
        if size > self._most:
            raise EOFError(f"a message of {size} bytes: expected at most {self._most}")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise EOFError(f"not a message: {error}") from error

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._incoming, min(size - len(data), 2**20))
            if not part:
                raise EOFError("the other side ended")
            data += part
        return bytes(data)
