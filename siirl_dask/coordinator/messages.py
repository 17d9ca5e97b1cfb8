"""How workers talk to each other about data: one request, one reply, over whatever carries bytes between two names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from siirl_dask.coordinator.frames import Frame


@dataclass(frozen=True, slots=True)
class Turn:
    """One passage of all workers through a chain. ``sequence`` counts the turns of a run and makes keys unique.

    ``step`` is the step that is trained, the first is 1; of a validation, how many were trained before it.
    """

    phase: str
    step: int
    sequence: int

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


@dataclass(frozen=True, slots=True)
class Request:
    """``op`` is one of ``up``, ``down``, ``rows`` and ``release``; ``rows`` are positions in what was published."""

    op: str
    key: TransitionKey
    rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    header: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[Frame] = ()


Handler = Callable[[Request], Awaitable[Reply]]


class Transport(Protocol):
    """Carries a request to a worker, by name, and its reply back. PeerError names a peer that is gone or refuses."""

    async def request(self, worker: str, request: Request) -> Reply: ...
