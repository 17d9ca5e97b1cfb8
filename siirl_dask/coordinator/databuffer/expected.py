"""Expected keys: those of edges, parts, relays and iterations that the plan can have. A peer may name no others.

Each key that is asked for before it is published makes something that waits for it. A peer that makes keys up must not
fill the memory with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short

from siirl_dask.coordinator.databuffer.relay import relay_of
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.coordinator.transport.window import Window
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge

_MAX_DIGITS = 10  # of a part's number
_MAX_AHEAD = 16  # parts beyond this worker's own: a source waits for everyone's acks after a few


class ExpectedKeys:
    """Finds the edge that a peer's key names. Belongs to the event loop. ``edges`` are the run's, by ``phase/name``."""

    def __init__(self, run: str, edges: Mapping[str, Edge], window: Window) -> None:
        self._run = run
        self._edges = edges
        self._window = window
        self._forgotten = 0
        self._parts: dict[tuple[int, str], int] = {}
        """The latest part that this worker is at, by sequence number and edge."""

    def own(self, key: TransitionKey, part: int | None) -> None:
        """Record a key that this worker itself publishes or pulls."""
        self._window.begin(key.sequence)
        if part is not None:
            name, _, _ = key.edge.rpartition("/")
            latest = self._parts.get((key.sequence, name), -1)
            self._parts[key.sequence, name] = max(part, latest)

    def forget(self, before: int) -> None:
        """Expect nothing of iterations before sequence number ``before`` any more."""
        self._forgotten = max(self._forgotten, before)
        self._parts = {(sequence, name): part for (sequence, name), part in self._parts.items() if sequence >= before}

    def edge(self, key: TransitionKey) -> Edge:
        """Return the edge that a peer's key names, of a part and of a relay as well. PeerError when there is none."""
        whole, relay = relay_of(key.edge)
        edge = self._edges.get(whole)
        if edge is None:
            name, _, part = whole.rpartition("/")
            last = self._parts.get((key.sequence, name), -1) + _MAX_AHEAD
            if part.isdecimal() and len(part) < _MAX_DIGITS and part == str(int(part)) and int(part) <= last:
                edge = self._edges.get(name)
        if key.run != self._run or edge is None or (relay is not None and relay >= len(edge.targets)):
            raise PeerError(f"refused edge {short(key.edge)} of run {key.run}: this is run {self._run}, without it")
        return edge

    def check_iteration(self, key: TransitionKey) -> None:
        """Raise PeerError for an iteration that is over, or that no peer can have reached."""
        if key.sequence < self._forgotten:
            raise PeerError(f"refused {key}: every worker has completed that iteration")
        self._window.check(key)
