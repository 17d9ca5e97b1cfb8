"""Waits until the workers of a cluster have come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from distributed import Client, Status

from siirl_dask.config import ClusterConfig
from siirl_dask.dask_internals import SchedulerRpc
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.errors import RunError
from siirl_dask.observe import Progress
from siirl_dask.scheduler import has_resources

_INTERVAL = 0.2  # seconds between two looks


def wait_for_workers(
    client: Client,
    cluster: ClusterConfig,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
    hint: str = "",
    limit: tuple[str, float] | None = None,
    workers: int | None = None,
) -> None:
    """Return once ``workers`` workers with ``cluster.resources`` are there, ``cluster.workers`` by
    default, and show how many are.

    RunError, which ends with ``hint``, after ``cluster.start_timeout`` seconds, or after another
    ``limit``: the key of a timeout and its seconds. ``check`` is called between looks and may raise
    sooner.
    """
    key = "cluster.start_timeout"
    timeout = cluster.start_timeout
    if limit is not None:
        key, timeout = limit
    needed = cluster.workers if workers is None else workers
    deadline = time.monotonic() + timeout
    with progress.arrivals(needed) as show:
        while True:
            running = _running(client, cluster.resources)
            show(running)
            if running >= needed:
                return
            check()
            left = deadline - time.monotonic()
            if left <= 0:
                which = "workers"
                if cluster.resources:
                    which = f"workers with cluster.resources={cluster.resources}"
                raise RunError(
                    f"{running} of {needed} {which} came up within {key}={timeout:g} s{hint}"
                )
            time.sleep(min(left, _INTERVAL))


def _running(client: Client, resources: Mapping[str, float]) -> int:
    """Return the number of workers with ``resources``, counted as ``Client.wait_for_workers``
    counts them.

    Ctrl-C inside one of Dask's own calls would break that call on its event loop, with a traceback
    of it.
    """
    scheduler = SchedulerRpc(client)
    workers = complete(client, lambda: scheduler.identity(n_workers=-1))["workers"].values()
    return sum(
        worker["status"] == Status.running.name and has_resources(worker["resources"], resources)
        for worker in workers
    )
