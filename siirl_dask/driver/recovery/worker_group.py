"""The workers of a launch of a run, and the configuration for as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.driver.phases import Phases
from siirl_dask.errors import SiirlError
from siirl_dask.planner import Iteration


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that train together."""

    members: Mapping[str, str]
    """{name: address}, in rank order."""
    config: Config
    """The user's, with this number of workers and their placement."""


Planner = Callable[[WorkerGroup], Phases]
"""Plans the run for a group of workers. UserError if it cannot work on it."""


class WorkerGroups(Protocol):
    """Finds the workers of each launch of a run."""

    def find(
        self,
        client: Client,
        group: WorkerGroup | None,
        failure: SiirlError | None,
        plugin: str | None,
    ) -> WorkerGroup:
        """Return the next group: the first, or that after ``group`` had a ``failure`` with plugins
        named ``plugin``.

        RunError if too few workers come, ConfigError for one that does not fit to the others.
        """
        ...

    def on_idle(self, client: Client, group: WorkerGroup, plugin: str) -> Callable[[], None] | None:
        """Return the function to call when idle workers have come; None if the run takes none."""
        ...

    def until_change(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        """Yield the iterations, as many as are done before the group changes."""
        ...

    def check_change(self, steps: int, since: float) -> None:
        """Raise WorkersJoined if the group is to change now that ``steps`` are done, the last
        one at time ``since``.
        """
        ...
