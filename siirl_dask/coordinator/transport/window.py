"""The window of iterations that peers may be in: how far another worker can be ahead of this one."""

from __future__ import annotations

from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.errors import PeerError


class Window:
    """Knows the latest iteration that this worker has begun. Belongs to the event loop.

    The driver starts at most ``ahead`` iterations beyond the first that some worker has not completed. So a peer is at
    most in the one ``ahead`` after the next of this worker's own.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._latest = -1

    def begin(self, sequence: int) -> None:
        """Record that this worker is in the iteration with this sequence number, or past it."""
        self._latest = max(self._latest, sequence)

    def check(self, key: TransitionKey) -> None:
        """Raise PeerError for an iteration that no peer can have reached."""
        last = self._latest + 1 + self._ahead
        if not 0 <= key.sequence <= last:
            raise PeerError(f"refused iteration {key.sequence}: expected at most {last}, as this run can have begun")
