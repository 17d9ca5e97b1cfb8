"""A run's part inside the process of Dask's scheduler, where it watches workers and nodes.
Imports no torch.
"""

from siirl_dask.scheduler.idle_workers import (
    DRIVERS,
    free_workers,
    has_resources,
    used_workers,
)
from siirl_dask.scheduler.supervisor import Supervisor
from siirl_dask.scheduler.worker_demand import WorkerDemand

__all__ = [
    "DRIVERS",
    "Supervisor",
    "WorkerDemand",
    "free_workers",
    "has_resources",
    "used_workers",
    "worker_demand",
]
