"""A cluster that adapts starts workers for runs, and takes none away from them.

Dask's own ``Adaptive`` counts tasks that wait. A run has none before its workers are there, and
pins each of its tasks to one of them afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

from distributed import Client
from distributed.deploy.adaptive import Adaptive as DaskAdaptive

from siirl_dask.config import ClusterConfig
from siirl_dask.dask_internals import SchedulerRpc
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.scheduler import WorkerDemand
from siirl_dask.scheduler.worker_demand import NAME

logger = logging.getLogger("siirl_dask.driver")
_TIMEOUT = 10.0  # seconds for the scheduler to note what a run wants
HINT = "; one that adapts starts workers for runs by cluster.adapt(Adaptive=siirl_dask.Adaptive)"
"""End of the message about an existing cluster without enough workers."""


class Adaptive(DaskAdaptive):
    """Scales a Dask cluster by the workers that runs want, and by the tasks of others.

        cluster.adapt(Adaptive=siirl_dask.Adaptive, minimum=0, maximum=8)

    A run wants ``cluster.workers`` of them, an elastic one ``cluster.max_workers`` where that is
    set. For the tasks of others it wants as many more as ``distributed.deploy.Adaptive`` does. The
    workers of a run stay until the run has ended.
    """

    async def target(self) -> int:
        """Return the number of workers that the cluster should have."""
        asked: int = await super().target()  # type: ignore[no-untyped-call]
        demand = await self._demand()
        if demand is None:
            return asked
        # Dask's number counts the tasks of runs as well, which go to no other worker
        return int(demand["wanted"]) + min(asked, int(demand["others"]))

    async def workers_to_close(self, target: int) -> list[str]:
        """Return the names of workers that the cluster can do without."""
        names: list[str] = await super().workers_to_close(target)
        demand = await self._demand()
        if demand is None:
            return names
        return [name for name in names if name not in demand["used"]]

    async def _demand(self) -> dict[str, Any] | None:
        """Return what ``WorkerDemand.read`` does; None where no run has been on the cluster."""
        scheduler = SchedulerRpc(self.cluster)
        if not await scheduler.call("get_metadata", keys=[NAME], default=False):
            return None
        demand: dict[str, Any] | None = await scheduler.call(f"{NAME}-read")
        return demand


def want_workers(client: Client, cluster: ClusterConfig) -> None:
    """Have a cluster with ``Adaptive`` start the run's workers; they are wanted until the client
    closes. An error does not end the run: the workers may be there.
    """
    wanted = cluster.workers
    if cluster.max_workers is not None:
        wanted = cluster.max_workers

    async def note() -> None:
        scheduler = SchedulerRpc(client)
        await client.register_plugin(WorkerDemand())
        await scheduler.call(f"{NAME}-want", driver=client.id, workers=wanted)
        await scheduler.call("set_metadata", keys=[NAME], value=True)

    try:
        complete(client, note, timeout=_TIMEOUT)
    except Exception as error:  # a scheduler that cannot import this, which is reported later
        kind = type(error).__name__
        logger.info("no workers are asked for by siirl_dask.Adaptive: %s: %s", kind, error)
