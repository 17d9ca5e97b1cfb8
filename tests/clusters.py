"""Clusters of worker processes on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import dask
from distributed import LocalCluster

from siirl_dask.worker.fork_server import START_METHOD, prepare_processes

IDLE = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}
"""Dask's periodic work, slowed down: every 10, 20 and 500 ms it costs four waiting workers a fifth of a core."""

LOST = {"distributed.deploy.lost-worker-timeout": "1 day"}
"""Or Dask closes a nanny whose worker died 15 s ago, if it has just died once more."""


@contextmanager
def local_cluster(workers: int, threads_per_worker: int = 1, **options: object) -> Iterator[LocalCluster]:
    """Start a cluster like a run does, without the run's settings. ``options`` are LocalCluster's."""
    prepare_processes()
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": START_METHOD, **LOST, **IDLE}),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads_per_worker,
            memory_limit=0,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
            **options,
        ) as cluster,
    ):
        yield cluster
