"""Finds the workers of a cluster that no run uses. Runs on the scheduler, which must not import
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Status

from siirl_dask.dask_internals import plugins_of

DRIVERS = "siirl-driver-"
"""Begin of the keys of drivers that are tasks, which leave their worker's threads to others."""


def has_resources(there: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    """Return whether a worker with the Dask resources ``there`` has all that are ``needed``."""
    return all(there.get(name, 0.0) >= amount for name, amount in needed.items())


def free_workers(
    own: str | None = None,
    resources: Mapping[str, float] | None = None,
    dask_scheduler: Any = None,
) -> dict[str, str]:
    """Return {name: address} of the workers that are idle, or the run's own.

    ``own`` is the name of the run's plugins; workers without all ``resources`` are left out. Dask
    sets ``dask_scheduler`` where it runs this on the scheduler.
    """
    used_by_others = other_runs(dask_scheduler, own)
    used_by_own = other_runs(dask_scheduler) - used_by_others
    free: dict[str, str] = {}
    for address, worker in dask_scheduler.workers.items():
        if worker.status is not Status.running:
            continue
        is_busy = any(not str(task.key).startswith(DRIVERS) for task in worker.processing)
        if address not in used_by_own and (address in used_by_others or is_busy):
            continue
        if resources is not None and not has_resources(worker.resources, resources):
            continue
        free[str(worker.name)] = address
    return free


def used_workers(own: str | None = None, dask_scheduler: Any = None) -> list[str]:
    """Return the addresses of the workers of all runs but that with the plugins ``own``. Dask sets
    ``dask_scheduler`` where it runs this on the scheduler.
    """
    return sorted(other_runs(dask_scheduler, own))


def other_runs(scheduler: Any, *own: str | None) -> set[str]:
    """Return the addresses of workers of all runs but those of the plugins ``own``."""
    runs = [
        run
        for name, run in plugins_of(scheduler).items()
        if name.startswith("siirl-") and name not in own
    ]
    return {address for run in runs for address in run.members.values()}
