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
"""What Dask does every 10, 20 and 500 milliseconds in each process: a fifth of a core for four workers that wait."""


@contextmanager
def local_cluster(workers: int, **options: object) -> Iterator[LocalCluster]:
    """As a run starts one, without its settings. ``options`` are LocalCluster's."""
    prepare_processes()
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": START_METHOD, **IDLE}),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=0,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
            **options,
        ) as cluster,
    ):
        yield cluster
