"""Finds workers for a run that has lost some: those that are left keep their ranks, others take the free ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from distributed import Client

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.arrivals import wait_for_workers
from siirl_dask.driver.calls import complete
from siirl_dask.driver.deployment import start_lost
from siirl_dask.driver.processes import members
from siirl_dask.driver.worker_group import WorkerGroup
from siirl_dask.errors import SchedulerLost, SiirlError, SilentPeer
from siirl_dask.observe import Progress
from siirl_dask.planner import Iteration
from siirl_dask.worker.data_plane import DataSettings

logger = logging.getLogger("siirl_dask.driver")
_STOP_TIMEOUT = 1.0  # seconds for a worker that answers nothing to stop by itself; then its nanny kills it
_CALL_TIMEOUT = 30.0  # seconds for the scheduler to remove it


class Fixed:
    """Worker groups of a run whose number of workers stays: another worker takes the place of one that is lost."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config, self._progress = config, progress

    def find(
        self, client: Client, group: WorkerGroup | None, failure: SiirlError | None, own: str | None
    ) -> WorkerGroup:
        cluster = self._config.cluster
        if group is None:
            return WorkerGroup(members(client, cluster.workers), self._config)
        if not isinstance(failure, SchedulerLost):  # whose cluster has been waited for
            give_up_silent(client, group.members.values(), self._config)
            start_lost_workers(client, cluster)
            wait_for_workers(client, cluster, self._progress)
        return WorkerGroup(members(client, cluster.workers, group.members), self._config)

    def look(self, client: Client, group: WorkerGroup, own: str) -> Callable[[], None] | None:
        return None

    def cut(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        return iterations

    def check(self, steps: int, since: float) -> None:
        return


def start_lost_workers(client: Client, cluster: ClusterConfig) -> None:
    """Have a cluster that the run has started by ``cluster.spec`` start lost workers anew."""
    if cluster.spec and client.cluster is not None:
        start_lost(client.cluster, cluster.workers)


def give_up_silent(client: Client, members: Iterable[str], config: Config) -> None:
    """Remove each worker that answers nothing for as long as a peer may be silent: nobody could go on with it.

    ``members`` are addresses. Where a nanny has started such a worker, that starts another. SilentPeer if the scheduler
    does not remove it in time.
    """
    addresses = list(members)
    patience = DataSettings.of(config, addresses).peer_timeout
    present = client.scheduler_info(n_workers=-1)["workers"]
    there = [address for address in addresses if address in present]
    answered: list[bool] = client.sync(_answer, client, there, patience)
    silent = [address for address, alive in zip(there, answered, strict=True) if not alive]
    if not silent:
        return
    logger.warning("given up, since they answer nothing for %g s: workers at %s", patience, ", ".join(silent))
    scheduler: Any = client.scheduler
    remove = partial(
        scheduler.restart_workers,
        workers=silent,
        timeout=_STOP_TIMEOUT,
        wait_for_workers=False,
        on_error="return",
        stimulus_id=f"siirl-dask-give-up-{time.time()}",
    )
    try:
        complete(client, remove, timeout=_CALL_TIMEOUT)
    except TimeoutError as error:
        where = ", ".join(silent)
        raise SilentPeer(
            f"workers at {where} answer nothing, and the scheduler has not removed them: {error}"
        ) from error


async def _answer(client: Client, addresses: Sequence[str], patience: float) -> list[bool]:
    async def answers(address: str) -> bool:
        try:
            await asyncio.wait_for(client.run(time.time, workers=[address]), patience)
        except Exception:  # a worker that is just leaving may break the connection in any way
            return False
        return True

    return await asyncio.gather(*map(answers, addresses))
