"""Demands of the parts of a step, and the seconds that a link and a machine make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A worker's link to the others: the alpha-beta model of a message, alpha being half a round
    trip.
    """

    rate: float
    """Bytes a second of one TCP stream."""
    round_trip: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Work of a part of a step for the worker that is last to finish it."""

    compute: float = 0.0
    """Seconds of its core or device, undisturbed."""
    wire: float = 0.0
    """Bytes over its link that nothing else hides."""
    trips: float = 0.0
    """Round trips, one after the other."""

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.compute + other.compute, self.wire + other.wire, self.trips + other.trips
        )

    def __mul__(self, times: float) -> Demand:
        return Demand(self.compute * times, self.wire * times, self.trips * times)

    def seconds(self, link: Link, slowdown: float = 1.0) -> float:
        """Return the seconds on a link, where a second of computing takes ``slowdown`` seconds."""
        return self.compute * slowdown + self.wire / link.rate + self.trips * link.round_trip


Step = Mapping[str, Demand]
"""The parts of a step, which come one after the other, by name."""


def seconds(step: Step, link: Link, slowdown: float = 1.0) -> float:
    """Return the seconds of a whole step."""
    return sum(part.seconds(link, slowdown) for part in step.values())
