"""Packs items and results of shared work into messages, and checks which work peers may name.

Messages are bytes: numbered values one after the other, in which each long value is a frame.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from siirl_dask.comms import wire
from siirl_dask.coordinator.databuffer.slots import Window
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.errors import PeerError

MAX_ITEMS = 2**12
"""Items or results in a message."""
MESSAGE = 2**24
"""Bytes of items or results in a message; a larger one is sent alone."""
_CALLS = frozenset(map(str, range(2**10)))  # queues of a node in an iteration


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """The work that may exist by the plan."""

    window: Window
    nodes: Collection[str]
    """The nodes, as ``phase/node``."""

    def check(self, key: TransitionKey) -> None:
        """Raise PeerError for other work: a request for it would wait, and be held in memory."""
        self.window.check(key)
        node, _, call = key.edge.rpartition("/")
        if node not in self.nodes or call not in _CALLS:
            raise PeerError(f"refused {short(key.edge)}: there is no such work here")


def pack(number: int, value: object) -> bytes:
    """Return a numbered item or result as bytes. PeerError when it is too large for a message."""
    packed = b"".join(wire.pack(number, value))
    if len(packed) > wire.MAX_REQUEST_FRAMES:
        raise PeerError(
            f"an item of shared work takes {len(packed)} bytes: expected at most "
            f"{wire.MAX_REQUEST_FRAMES}; set rollout.work_stealing=false for rows as long as this"
        )
    return packed


def messages_of(results: Sequence[tuple[int, Any]]) -> Iterator[bytes]:
    """Yield numbered results as bytes, cut into messages."""
    parts: list[bytes] = []
    size = 0
    for number, result in results:
        packed = pack(number, result)
        if parts and (size + len(packed) > MESSAGE or len(parts) == MAX_ITEMS):
            yield b"".join(parts)
            parts = []
            size = 0
        parts.append(packed)
        size += len(packed)
    yield b"".join(parts)


def read(packed: object) -> list[tuple[int, object]]:
    """Return numbered items or results that a peer sent. PeerError when ``packed`` holds
    anything else.
    """
    return [
        (message.number, message.head)
        for message in wire.read_messages(packed, wire.REQUEST, MAX_ITEMS)
    ]
