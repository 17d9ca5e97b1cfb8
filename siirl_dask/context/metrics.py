"""Values that nodes log, merged over workers to one number of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isnan, nan


class Reduce(StrEnum):
    """Reduction of the values that all workers logged under one name to the step's number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"


@dataclass(slots=True)
class Metric:
    """A mergeable summary of logged values; ``reduce`` chooses the number that it yields."""

    reduce: Reduce
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self.weight += weight
        self.total += weight * value
        self.squares += weight * value * value
        self._stretch(value, value)

    def merge(self, other: Metric) -> None:
        """Add the values that another worker logged under the same name. ValueError if its
        reducer differs.
        """
        if other.reduce is not self.reduce:
            raise ValueError(
                f"logged with reducer {self.reduce} and with {other.reduce}: choose one"
            )
        self.weight += other.weight
        self.total += other.total
        self.squares += other.squares
        self._stretch(other.low, other.high)

    def _stretch(self, low: float, high: float) -> None:
        bad = any(map(isnan, (low, high, self.low, self.high)))  # min() and max() would hide a nan
        self.low = nan if bad else min(self.low, low)
        self.high = nan if bad else max(self.high, high)

    @property
    def value(self) -> float | None:
        """The reduced number; None if nothing was logged, as with empty partitions everywhere."""
        if self.weight == 0:
            return None
        match self.reduce:
            case Reduce.MEAN:
                return self.total / self.weight
            case Reduce.SUM:
                return self.total
            case Reduce.MAX:
                return self.high
            case Reduce.MIN:
                return self.low
            case Reduce.STD:
                mean = self.total / self.weight
                return float(max(self.squares / self.weight - mean * mean, 0.0) ** 0.5)
