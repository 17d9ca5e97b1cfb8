"""Notices, on the scheduler, a worker whose node makes no progress, and one whose process sends no
heartbeats.

Time is the sum of the intervals between checks, not read from a clock: a scheduler that stood still
itself has heard nobody meanwhile. The scheduler imports this module: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from siirl_dask.worker.monitoring.task_progress import NODE, Reading

# of the timeout: a worker that has been silent for that long may be the cause as well
_REPORTED_FROM = 0.5


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker that has been silent."""

    member: str
    place: str
    """Where its task was at the last reading."""
    seconds: float
    heard: bool
    """Whether its process still sends heartbeats."""


@dataclass(slots=True)
class _Member:
    """The last reading of a worker, and the times of its last signs of life."""

    reading: Reading
    heartbeat: float
    """Time of its last heartbeat, by any clock."""
    active_at: float
    """Time of the watch when it last made progress, waited, or was in no node."""
    heard_at: float
    """Time of the watch when its last heartbeat arrived."""


class NodeWatch:
    """Compares the readings of all workers from check to check. A ``timeout`` of 0 notices
    nothing.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds of silence of one node on one worker, and of a worker without
        heartbeats.
        """
        self.timeout = timeout
        self._now = 0.0
        self._members: dict[str, _Member] = {}

    def silent_workers(
        self, seconds: float, readings: Mapping[str, tuple[Reading, float]]
    ) -> list[Silence]:
        """Return the silent workers once one is silent for too long: those without heartbeats and
        the longest silence first.

        ``seconds`` have passed since the previous check. ``readings`` has each worker's last
        reading, and the time of its last heartbeat, by any clock.
        """
        if not self.timeout:
            return []
        self._now += seconds
        self._members = {
            name: self._updated(name, reading, heartbeat)
            for name, (reading, heartbeat) in readings.items()
        }
        silences = [self._silence(name, member) for name, member in self._members.items()]
        if not any(silence.seconds >= self.timeout for silence in silences):
            return []
        reported = [
            silence for silence in silences if silence.seconds >= _REPORTED_FROM * self.timeout
        ]
        return sorted(reported, key=lambda silence: (silence.heard, -silence.seconds))

    def _updated(self, name: str, reading: Reading, heartbeat: float) -> _Member:
        before = self._members.get(name)
        if before is None:
            return _Member(reading, heartbeat, active_at=self._now, heard_at=self._now)
        active_at = before.active_at
        if (
            reading.beats != before.reading.beats
            or reading.waits
            or not reading.place.startswith(NODE)
        ):
            active_at = self._now
        heard_at = before.heard_at if heartbeat == before.heartbeat else self._now
        return _Member(reading, heartbeat, active_at=active_at, heard_at=heard_at)

    def _silence(self, name: str, member: _Member) -> Silence:
        without_heartbeat = self._now - member.heard_at
        without_progress = self._now - member.active_at
        heard = without_heartbeat < _REPORTED_FROM * self.timeout
        seconds = without_heartbeat
        if heard:
            seconds = without_progress
        return Silence(name, member.reading.place, seconds, heard)
