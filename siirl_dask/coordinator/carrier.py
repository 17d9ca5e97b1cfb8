"""What carries one request to a worker and one reply back, below the transport."""

from __future__ import annotations

from typing import Protocol

from siirl_dask.coordinator.messages import Reply, Request


class Carrier(Protocol):
    """A way to reach workers by name. ``ask`` raises OSError when the peer is gone, PeerError when it refuses."""

    async def reaches(self, worker: str) -> bool: ...

    async def ask(self, worker: str, request: Request) -> Reply: ...

    async def close(self) -> None: ...
