"""Finds workers for a run that has lost some: those that are left keep their ranks, others take the free ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from distributed import Client

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.arrivals import wait_for_workers
from siirl_dask.driver.calls import complete
from siirl_dask.driver.deployment import no_replacement, start_lost
from siirl_dask.driver.processes import members
from siirl_dask.driver.worker_group import WorkerGroup
from siirl_dask.errors import SchedulerLost, SiirlError, SilentPeer
from siirl_dask.observe import Progress
from siirl_dask.planner import Iteration
from siirl_dask.worker.data_plane import DataSettings
from siirl_dask.worker.idle_workers import free_workers
from siirl_dask.worker.release import LEAVE_TIMEOUT
from siirl_dask.worker.tasks import beats_inside

logger = logging.getLogger("siirl_dask.driver")
_LAST_CHANCE = 2.0  # seconds for a worker to answer that has been silent for as long as it may be
_STOP_TIMEOUT = 1.0  # seconds for a worker that answers nothing to stop by itself; then its nanny kills it
_CALL_TIMEOUT = 30.0  # seconds for the scheduler to remove it
_GLANCE = 0.1  # seconds between two looks at the tasks of a try that has failed


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
            give_up(client, group, failure, own)
            hint = start_lost_workers(client, cluster, group)
            wait_for_workers(client, cluster, self._progress, hint=hint)
        return WorkerGroup(members(client, cluster.workers, group.members), self._config)

    def on_idle(self, client: Client, group: WorkerGroup, own: str) -> Callable[[], None] | None:
        return None

    def until_change(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        return iterations

    def check_change(self, steps: int, since: float) -> None:
        return


def start_lost_workers(client: Client, cluster: ClusterConfig, group: WorkerGroup) -> str:
    """Have a cluster that the run has started by ``cluster.spec`` start the lost workers of the group anew.

    Returns what to add to the error of a run for which too few workers come.
    """
    if not cluster.spec or client.cluster is None:
        return ""
    there = client.scheduler_info(n_workers=-1)["workers"]
    lost = {name for name, address in group.members.items() if address not in there}
    start_lost(client.cluster, cluster.workers, lost)
    return no_replacement(cluster.spec, client.cluster)


def give_up(client: Client, group: WorkerGroup, failure: SiirlError | None, own: str | None) -> None:
    """Remove the workers with which nobody could go on, nor begin a run: those that answer nothing, and those whose
    task does not return.

    Where a nanny has started such a worker, that kills it and starts another. ``own`` is the name of the plugins of the
    try that failed. SilentPeer if the scheduler does not remove a worker in time.
    """
    _give_up_silent(client, group, failure, own)
    if own is not None:
        _give_up_stuck(client, group, own)


def _give_up_stuck(client: Client, group: WorkerGroup, own: str) -> None:
    """Wait until all tasks of the try have left the group's workers, and remove those where one never does.

    A worker runs one task at a time: the next try would wait for that one, which may wait for a device for ever.
    """
    beats: dict[str, int] = {}
    since: dict[str, float] = {}
    while inside := _tasks_inside(client, group, own):
        now = time.monotonic()
        for address, count in inside.items():
            if beats.get(address) != count:
                beats[address] = count
                since[address] = now
        stuck = [address for address in inside if now - since[address] >= LEAVE_TIMEOUT]
        if stuck:
            logger.warning("given up, since their task does not return: workers at %s", ", ".join(stuck))
            _remove(client, stuck)
            since.update(dict.fromkeys(stuck, now))
        time.sleep(_GLANCE)


def _tasks_inside(client: Client, group: WorkerGroup, own: str) -> dict[str, int]:
    """Return the addresses of workers with a task of the try inside, with the number of things that it got done."""
    present = client.scheduler_info(n_workers=-1)["workers"]
    addresses = [address for address in group.members.values() if address in present]

    async def ask(address: str) -> int | None:
        try:
            answers = await asyncio.wait_for(client.run(beats_inside, own, workers=[address]), _CALL_TIMEOUT)
        except Exception:  # a worker that is just leaving may break the connection in any way
            return None
        count: int | None = answers[address]
        return count

    async def ask_all() -> list[int | None]:
        return await asyncio.gather(*map(ask, addresses))

    counts: list[int | None] = client.sync(ask_all)
    return {address: count for address, count in zip(addresses, counts, strict=True) if count is not None}


def _give_up_silent(client: Client, group: WorkerGroup, failure: SiirlError | None, own: str | None) -> None:
    """Remove each worker, of the group or idle, that answers nothing for as long as a peer may be silent.

    One that was silent for that long before, as its peers have found, has a last chance of two seconds.
    """
    patiences = _patiences(client, group, own, was_silent=isinstance(failure, SilentPeer))
    answered: list[bool] = client.sync(_answer, client, patiences)
    if silent := [address for address, alive in zip(patiences, answered, strict=True) if not alive]:
        logger.warning("given up, since they answer nothing: workers at %s", ", ".join(silent))
        _remove(client, silent)


def _patiences(client: Client, group: WorkerGroup, own: str | None, *, was_silent: bool) -> dict[str, float]:
    """Return the seconds within which the worker at each address has to answer.

    ``was_silent`` says whether a peer was found to be silent; its last heartbeat is older than the others' then.
    """
    members = group.members.values()
    idle: dict[str, str] = complete(client, lambda: client.run_on_scheduler(free_workers, own))
    patience = DataSettings.of(group.config, members).peer_timeout
    seen = {address: info["last_seen"] for address, info in client.scheduler_info(n_workers=-1)["workers"].items()}
    late = max(seen.values(), default=0.0) - patience if was_silent else 0.0
    return {
        address: min(patience, _LAST_CHANCE) if seen[address] <= late else patience
        for address in {*members, *idle.values()} & seen.keys()
    }


def _remove(client: Client, addresses: Sequence[str]) -> None:
    """Have the scheduler remove workers, and their nannies kill them. SilentPeer if it does not do so in time.

    A worker without a nanny leaves the cluster and stays as a process.
    """
    scheduler: Any = client.scheduler
    remove = partial(
        scheduler.restart_workers,
        workers=addresses,
        timeout=_STOP_TIMEOUT,
        wait_for_workers=False,
        on_error="return",
        stimulus_id=f"siirl-dask-give-up-{time.time()}",
    )
    try:
        complete(client, remove, timeout=_CALL_TIMEOUT)
    except TimeoutError as error:
        raise SilentPeer(
            f"workers at {', '.join(addresses)} are of no use, and the scheduler has not removed them: {error}"
        ) from error


async def _answer(client: Client, patiences: Mapping[str, float]) -> list[bool]:
    """Return whether the worker at each address answers within the seconds that it has."""

    async def answers(address: str, patience: float) -> bool:
        try:
            await asyncio.wait_for(client.run(time.time, workers=[address]), patience)
        except Exception:  # a worker that is just leaving may break the connection in any way
            return False
        return True

    return await asyncio.gather(*(answers(address, patience) for address, patience in patiences.items()))
