"""Tells a page of runs what their folders do not: which there are, whether they go on, and what
their workers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from siirl_dask.views.dashboard.store import LiveRun, RunStore
from siirl_dask.views.dashboard.workers_panel import WorkerState


@dataclass(frozen=True, slots=True)
class Pulses:
    """Newest readings that the workers of a run have reported."""

    readings: Mapping[str, tuple[int, str, bool]] = field(default_factory=dict)
    """Things done, place, and whether it waits, of each worker."""
    states: list[WorkerState] = field(default_factory=list)


class PageSource(Protocol):
    """Where a page finds its runs: a scheduler that they use, or their folders."""

    store: RunStore
    is_served: bool
    """Whether a server of the page alone shows it, which may end while the run goes on."""

    def refresh(self) -> None:
        """Bring the store up to date."""
        ...

    def goes_on(self, run: LiveRun) -> bool:
        """Return whether the run is under way."""
        ...

    def pulse_seconds(self) -> float:
        """Return the seconds between two reports of a worker."""
        ...

    def pulses(self, run: LiveRun) -> Pulses:
        """Return the newest reports of the run's workers."""
        ...
