"""Follows where workers are by their pulses, for a timeline of the step under way. Bounded in
time and in number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

WAITS = "waits for other workers"
IDLE = "between tasks"
_NODE = re.compile(r"node '([^']+)'")
_SECONDS = 120.0  # that are remembered
_MOST = 400  # stretches of a worker
_WORKERS = 1024


class Stay(NamedTuple):
    """A time in which a worker's pulse had one place."""

    place: str
    """Node, or another place that the worker reported."""
    waits: bool
    start: float
    """Seconds of the caller's clock."""
    end: float
    beats: int
    """Number of things that had got done at its end."""


@dataclass(slots=True)
class Live:
    """Remembers the last two minutes of each worker's pulse."""

    stays: dict[str, deque[Stay]] = field(default_factory=dict)

    def note(self, now: float, readings: Mapping[str, tuple[int, str, bool]]) -> None:
        """Record at ``now`` beats, place and whether it waits of each worker; others are
        forgotten.
        """
        self.stays = {
            worker: self.stays.get(worker) or deque(maxlen=_MOST)
            for worker in list(readings)[:_WORKERS]
        }
        for worker, own in self.stays.items():
            beats, where, waits = readings[worker]
            node = node_of(where)
            place = IDLE
            if node:
                place = node
            last = None
            if own:
                last = own[-1]
            if last is not None and (last.place, last.waits) == (place, waits):
                own[-1] = Stay(place, waits, last.start, now, beats)
            else:
                own.append(Stay(place, waits, last.end if last is not None else now, now, beats))
            while own and own[0].end < now - _SECONDS:
                own.popleft()

    def rate(self, worker: str, seconds: float = 10.0) -> float:
        """Return the things that a worker got done a second in about the last ``seconds``; 0
        where nothing is known.
        """
        own = self.stays.get(worker)
        if not own:
            return 0.0
        last = own[-1]
        before = next((stay for stay in reversed(own) if stay.end <= last.end - seconds), own[0])
        if last.end > before.end:
            return max(0.0, (last.beats - before.beats) / (last.end - before.end))
        return 0.0


def node_of(place: str) -> str:
    """Return the node that a place names, or the place itself, which may be empty."""
    found = _NODE.match(place)
    if found:
        return found[1]
    return place
