"""Notices, on the scheduler, a worker on which a node gets nothing done, and one whose process says nothing at all.

Time is counted in looks, not read from a clock: a scheduler that stood still itself has heard nobody meanwhile. The
scheduler imports this module: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from siirl_dask.worker.pulse import NODE, Reading

_ALSO = 0.5  # of the timeout: who has been silent for that long may be the cause as well


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker that has been silent."""

    member: str
    place: str
    """Where its task was, as far as it has told."""
    seconds: float
    heard: bool
    """Whether its process still sends heartbeats."""


@dataclass(slots=True)
class _Known:
    reading: Reading
    seen: float
    active_at: float
    heard_at: float


class NodeWatch:
    """Compares the readings of all workers from look to look. A ``timeout`` of 0 sees nothing."""

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds of silence of one node on one worker, and of a worker without heartbeats."""
        self.timeout = timeout
        self._now = 0.0
        self._known: dict[str, _Known] = {}

    def look(self, seconds: float, readings: Mapping[str, tuple[Reading, float]]) -> list[Silence]:
        """Return who is silent, those without heartbeats and the longest silence first, once one is for too long.

        ``seconds`` have passed since the look before. ``readings`` has each worker's last reading, and when its last
        heartbeat came, by any clock.
        """
        if not self.timeout:
            return []
        self._now += seconds
        self._known = {member: self._compare(member, *given) for member, given in readings.items()}
        silences = [self._silence(member, known) for member, known in self._known.items()]
        if not any(one.seconds >= self.timeout for one in silences):
            return []
        named = [one for one in silences if one.seconds >= _ALSO * self.timeout]
        return sorted(named, key=lambda one: (one.heard, -one.seconds))

    def _compare(self, member: str, reading: Reading, seen: float) -> _Known:
        before = self._known.get(member)
        if before is None:
            return _Known(reading, seen, self._now, self._now)
        works = reading.beats != before.reading.beats or reading.waits or not reading.place.startswith(NODE)
        return _Known(
            reading,
            seen,
            active_at=self._now if works else before.active_at,
            heard_at=self._now if seen != before.seen else before.heard_at,
        )

    def _silence(self, member: str, known: _Known) -> Silence:
        mute, still = self._now - known.heard_at, self._now - known.active_at
        heard = mute < _ALSO * self.timeout
        return Silence(member, known.reading.place, still if heard else mute, heard)
