"""How workers talk to each other about data: one request, one reply, over whatever carries bytes between two names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.frames import Frame
from siirl_dask.errors import PeerError


@dataclass(frozen=True, slots=True)
class Turn:
    """One passage of all workers through a chain. ``sequence`` counts the turns of a run and makes keys unique.

    ``step`` is the step that is trained, the first is 1; of a validation, how many were trained before it.
    """

    phase: str
    step: int
    sequence: int
    settles: bool = False
    """What is behind its step catches up in this turn."""

    @property
    def batch(self) -> int:
        """Which batch of its dataset the turn reads, from 0."""
        return max(self.step - 1, 0)

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}"


@dataclass(frozen=True, slots=True)
class TransitionKey:
    """Names what one edge published in one turn of one run. What it names never changes, so asking again is safe."""

    run: str
    sequence: int
    edge: str


class Op(StrEnum):
    """What is asked of a peer."""

    UP = "up"
    """Statistics of the rows that lie below it in an edge's tree."""
    DOWN = "down"
    """Statistics of all rows of an edge."""
    DESCRIBE = "describe"
    """Of the rows named, how long each is in each column, and the columns that are small."""
    FILL = "fill"
    """The bytes of the rows named, in the reply or straight to where the asker wants them."""
    RELEASE = "release"
    """Nobody will ask for so many rows again."""
    STEAL = "steal"
    """Items of a node's work that the peer has not begun."""
    BRING = "bring"
    """Results of such."""
    STORE = "store"
    """The port of the process groups' store."""
    PING = "ping"
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Request:
    """``body`` is plain data: numbers, text, bytes, lists and mappings of them. Receivers check it."""

    op: str
    key: TransitionKey
    body: Mapping[str, Any] = field(default_factory=dict)

    def pack(self) -> list[Any]:
        return [str(self.op), self.key.sequence, self.key.edge, dict(self.body)]


def read_request(run: str, packed: object) -> Request:
    """PeerError for what is no request."""
    match packed:
        case [str(op), int(sequence), str(edge), dict(body)]:
            return Request(op, TransitionKey(run, sequence, edge), body)
    raise PeerError(f"received {str(packed)[:120]!r}, which is no request")


@dataclass(frozen=True, slots=True)
class Reply:
    header: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[Frame] = ()

    @property
    def nbytes(self) -> int:
        return sum(memoryview(frame).nbytes for frame in self.frames)


Handler = Callable[[Request], Awaitable[Reply]]


class Transport(Protocol):
    """Carries a request to a worker, by name, and its reply back. PeerError names a peer that is gone, stalls or
    refuses.
    """

    async def request(self, worker: str, request: Request) -> Reply: ...


def pack_ints(values: Ints) -> bytes:
    return np.ascontiguousarray(values, "<i8").tobytes()


def unpack_ints(value: object, below: int, most: int) -> Ints:
    """At most ``most`` numbers from 0 to below ``below``. PeerError for anything else."""
    if not isinstance(value, bytes | bytearray | memoryview) or memoryview(value).nbytes % 8:
        raise PeerError(f"received {str(value)[:40]!r} where numbers were expected")
    numbers = np.frombuffer(value, "<i8").astype(np.int64)
    if len(numbers) > most:
        raise PeerError(f"received {len(numbers)} numbers where at most {most} were expected")
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= below):
        raise PeerError(f"received numbers from {numbers.min()} to {numbers.max()}: expected 0 to {below - 1}")
    return numbers
