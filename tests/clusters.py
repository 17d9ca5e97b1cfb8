"""Clusters of worker processes on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import dask
from distributed import LocalCluster

from siirl_dask.worker.processes import START_METHOD, prepare_processes


@contextmanager
def local_cluster(workers: int, **options: object) -> Iterator[LocalCluster]:
    """As a run starts one, without its settings. ``options`` are LocalCluster's."""
    prepare_processes()
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": START_METHOD}),
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
