"""Protocol that a system implements in order to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from work import Held, Work

PATIENCE = 300.0  # seconds for anything a system is asked to do; then it counts as failed


class Method(Protocol):
    """One way of doing the work. Only ``run`` is timed."""

    name: str

    def before(self) -> None:
        """Get ready for a round."""

    def run(self) -> None:
        """Return when every destination holds its rows and has touched them."""

    def check(self) -> list[Held]:
        """Return the rows that each destination holds after ``run``."""

    def driver_bytes(self) -> int:
        """Bytes that the last ``run`` took through the driver's process, which has Dask's
        scheduler in it as well.
        """

    def after(self) -> None:
        """Drop what arrived, so that every round begins alike."""


class System(Protocol):
    """Processes that hold the rows, and the methods that these processes serve."""

    def start(self, work: Work) -> Sequence[Method]:
        """Start the processes, make the rows where the sources are."""

    def close(self) -> None:
        """End the processes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system that may not be installed: ``build`` imports it. ``methods`` are the names of
    what it then offers.
    """

    methods: tuple[str, ...]
    build: Callable[[], System]
