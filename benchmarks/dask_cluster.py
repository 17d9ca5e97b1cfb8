"""A Dask cluster of processes on this machine, or one that is there already. Its scheduler counts
the bytes that pass through it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client, Future, LocalCluster, Scheduler, SchedulerPlugin, wait

from method import PATIENCE
from siirl_dask.dask_internals import connection_bytes
from siirl_dask.scheduler.supervisor import TrafficMeter

_MODULES = ("work.py", "method.py", "dask_cluster.py", "ours.py")


class Traffic(SchedulerPlugin):
    """Bytes over the scheduler's connections: those of the workers and of the client."""

    name = "benchmark_traffic"

    async def start(self, scheduler: Scheduler) -> None:
        meter = TrafficMeter(scheduler)
        scheduler.handlers[self.name] = meter.total


class DaskCluster:
    """The first ``count`` workers of a cluster, in the order of their names: 0, 1, ... in one that
    is started here.

    With an ``address`` it is the cluster of that scheduler, which needs this project but none of
    these scripts: what its workers run of them is sent there.
    """

    def __init__(self, count: int, address: str = "") -> None:
        self._cluster = None if address else _start_cluster(count)
        self.client = Client(self._cluster or address)
        self.client.wait_for_workers(count, timeout=PATIENCE)
        if address:
            for module in _MODULES:
                self.client.upload_file(str(Path(__file__).with_name(module)), load=False)
        self.client.register_plugin(Traffic())
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        names = {str(worker["name"]): address for address, worker in workers.items()}
        chosen = sorted(names, key=lambda name: (not name.isdecimal(), name.zfill(20)))[:count]
        self.members = {name: names[name] for name in chosen}
        self.addresses = list(self.members.values())

    def traffic(self) -> int:
        """Bytes through the scheduler and the client so far, heartbeats and calls to workers
        included.
        """

        async def ask() -> int:
            return await getattr(self.client.scheduler, Traffic.name)() or 0

        pools = (self.client.rpc.available, self.client.rpc.occupied)
        direct = (
            connection_bytes(comm) or 0
            for pool in pools
            for comms in pool.values()
            for comm in comms
        )
        through_scheduler: int = self.client.sync(ask)
        return through_scheduler + sum(direct)

    def close(self) -> None:
        self.client.close()
        if self._cluster is not None:
            self._cluster.close()


def _start_cluster(count: int) -> LocalCluster:
    """Start one worker process of one thread each."""
    with _environment_kept():
        return LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            memory_limit=0,
            silence_logs=logging.CRITICAL,
        )


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Dask leaves what it sets for its workers in this process: systems that start later would
    inherit its malloc settings, with which TransferQueue takes twice as long.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def wait_for(futures: Sequence[Future[Any]]) -> None:
    """Until all are done; raises what one of them raised."""
    done, _ = wait(futures, timeout=PATIENCE)
    for future in done:
        if future.status == "error":
            raise future.exception()
