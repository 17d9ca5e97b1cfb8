"""Workers that compute nothing, many in one process, for measuring what a step costs the scheduler
and the client.

python benchmarks/scale/idle_worker.py SCHEDULER FIRST END    # workers FIRST to END - 1, until the
process is killed
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import dask
from distributed import Worker

from siirl_dask.context import Metric, Reduce
from siirl_dask.observe import pack
from siirl_dask.planner import Iteration
from siirl_dask.worker.dag_worker import DAGWorker
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.monitoring.tracing import Tracing
from siirl_dask.worker.release import Release
from siirl_dask.worker.stop import StopFlag, TaskOrder

METRICS = 40  # what a worker of the quickstart logs in a step
_AT_ONCE = 32
_QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "5s",
    "distributed.admin.system-monitor.interval": "60s",
    "distributed.comm.timeouts.connect": "120s",
}
"""Dask's periodic work in a worker, slowed down: here a hundred workers share a process and two
cores."""


class IdleWorker(DAGWorker):
    """A DAG worker without roles, peers or links: it takes its tasks and reports metrics like
    any other.
    """

    async def setup(self, worker: Worker) -> None:
        self.stop = StopFlag()
        self.task_order = TaskOrder(self.stop)
        self.release = Release(lambda: None)
        self.worker_name = str(worker.name)
        self._worker = worker
        self._peers = None
        self._device = None
        self.port = 0
        self.tracing = Tracing(self.spec, self.worker_name)
        self.progress = TaskProgress()
        worker.metrics[self.name] = lambda worker: self.progress.read()

    def start(self, ports: Sequence[int]) -> None:
        pass

    def run_chain(self, iteration: Iteration, completed: int) -> None:
        metrics: dict[str, Metric] = {}
        for number in range(METRICS):
            metrics[f"group/metric_{number}"] = metric = Metric(Reduce.MEAN)
            metric.add(iteration.step + number / 7)
        self._report({"kind": "done", "sequence": iteration.sequence, "metrics": pack(metrics)})

    async def teardown(self, worker: Worker) -> None:
        worker.metrics.pop(self.name, None)
        self.tracing.close()
        self.release.end(0.0)


async def serve(scheduler: str, first: int, end: int) -> None:
    """Start the workers and stay."""
    options: dict[str, Any] = {"nthreads": 1, "dashboard": False, "memory_limit": 0}
    for start in range(first, end, _AT_ONCE):
        names = range(start, min(start + _AT_ONCE, end))
        await asyncio.gather(*(Worker(scheduler, name=str(name), **options) for name in names))
    await asyncio.Event().wait()


if __name__ == "__main__":
    dask.config.set(_QUIET)
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
