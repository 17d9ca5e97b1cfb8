"""Counts, on the scheduler, the workers that runs want and have, for a cluster that adapts to them.
The scheduler imports this module: no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

from siirl_dask.dask_internals import (
    add_handlers,
    plugins_of,
    remove_handlers,
    tasks_by_state,
)
from siirl_dask.scheduler.idle_workers import other_runs
from siirl_dask.worker.tasks import is_task_of

if TYPE_CHECKING:
    from distributed import Scheduler

NAME = "run-demand"  # not siirl-*: those are runs
_PENDING = ("waiting", "no-worker", "queued", "processing", "memory")
"""States of tasks that need a worker, or hold a result on one."""


class WorkerDemand(SchedulerPlugin):
    """Knows how many workers each driver wants, for as long as its client is connected. The
    scheduler's handlers ``run-demand-*`` take the calls of drivers and of ``siirl_dask.Adaptive``.
    """

    name = NAME
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wanted: dict[str, int] = {}
        calls: tuple[Callable[..., Any], ...] = (self.want, self.read)
        self._handlers = {f"{NAME}-{call.__name__}": call for call in calls}
        add_handlers(scheduler, self._handlers)

    async def close(self) -> None:
        remove_handlers(self._scheduler, self._handlers)

    def want(self, driver: str, workers: int) -> None:
        """Note that the driver with this client wants so many workers in all."""
        self._wanted[driver] = workers

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self._wanted.pop(client, None)

    def read(self) -> dict[str, Any]:
        """Return the number of workers that runs want, the number of tasks that are no run's, and
        the names of the workers that runs have.
        """
        addresses = other_runs(self._scheduler)
        workers = self._scheduler.workers
        names = [workers[address].name for address in addresses if address in workers]
        return {
            "wanted": sum(self._wanted.values()),
            "others": self._tasks_of_others(),
            "used": names,
        }

    def _tasks_of_others(self) -> int:
        runs = [name for name in plugins_of(self._scheduler) if name.startswith("siirl-")]
        count = 0
        for group, states in tasks_by_state(self._scheduler).items():
            if not any(is_task_of(run, (group,)) for run in runs):
                count += sum(states.get(state, 0) for state in _PENDING)
        return count
