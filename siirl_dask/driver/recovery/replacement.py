"""Finds workers for a run that has lost some: those that are left keep their ranks, others take
the free ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from distributed import Client

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.dask_internals import SchedulerRpc
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.clusters.deployment import no_replacement, start_lost
from siirl_dask.driver.clusters.processes import members, running_workers
from siirl_dask.driver.clusters.wait_for_workers import wait_for_workers
from siirl_dask.driver.recovery.worker_group import WorkerGroup
from siirl_dask.errors import RunError, SchedulerLost, SiirlError, SilentPeer, counted
from siirl_dask.observe import Progress
from siirl_dask.planner import Iteration
from siirl_dask.scheduler import free_workers, used_workers
from siirl_dask.worker.peers.data_plane import DataSettings
from siirl_dask.worker.release import LEAVE_TIMEOUT
from siirl_dask.worker.tasks import beats_inside

logger = logging.getLogger("siirl_dask.driver")
_LAST_CHANCE = 2.0  # seconds for a worker to answer that has been silent for as long as it may be
# seconds for a worker that answers nothing to stop by itself; then its nanny kills it
_STOP_TIMEOUT = 1.0
_CALL_TIMEOUT = 30.0  # seconds for the scheduler to remove it
_INTERVAL = 0.1  # seconds between two looks at the scheduler


class FixedWorkers:
    """Worker groups of a run whose number of workers stays: another worker takes the place of
    one that is lost.
    """

    def __init__(self, config: Config, progress: Progress, check: Callable[[], None]) -> None:
        """``check`` is called while workers are waited for, and may raise."""
        self._config = config
        self._progress = progress
        self._check = check

    def find(
        self,
        client: Client,
        group: WorkerGroup | None,
        failure: SiirlError | None,
        plugin: str | None,
    ) -> WorkerGroup:
        cluster = self._config.cluster
        if group is None:
            taken = await_free_workers(client, cluster, None, self._progress, self._check)
            chosen = members(client, cluster.workers, resources=cluster.resources, taken=taken)
            return WorkerGroup(chosen, self._config)
        # the workers of another scheduler have been waited for
        if not isinstance(failure, SchedulerLost):
            remove_unusable_workers(client, group, failure, plugin)
            hint = start_lost_workers(client, cluster, group)
            wait_for_workers(client, cluster, self._progress, self._check, hint=hint)
        taken = await_free_workers(client, cluster, plugin, self._progress, self._check)
        chosen = members(client, cluster.workers, group.members, cluster.resources, taken)
        return WorkerGroup(chosen, self._config)

    def on_idle(self, client: Client, group: WorkerGroup, plugin: str) -> Callable[[], None] | None:
        return None

    def until_change(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        return iterations

    def check_change(self, steps: int, since: float) -> None:
        return


def await_free_workers(
    client: Client,
    cluster: ClusterConfig,
    plugin: str | None,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the addresses of the workers that other runs use, once they leave ``cluster.workers``
    with ``cluster.resources``. ``plugin`` is the name of the run's own plugins.

    A worker is of one run at a time: see ``Supervisor``. RunError after ``cluster.start_timeout``
    seconds. ``check`` is called between looks and may raise sooner.
    """
    deadline = time.monotonic() + cluster.start_timeout
    is_noted = False
    while True:
        taken: list[str] = complete(client, lambda: client.run_on_scheduler(used_workers, plugin))
        running = running_workers(client, cluster.resources)
        free = [name for name, address in running.items() if address not in taken]
        if not taken or len(free) >= cluster.workers:
            return taken
        check()
        used = f"other runs use {counted(len(running) - len(free), 'worker')}"
        if time.monotonic() > deadline:
            raise RunError(
                f"{len(free)} of {cluster.workers} workers were free within "
                f"cluster.start_timeout={cluster.start_timeout:g} s: {used} of the cluster, and a "
                "worker is of one run at a time; start more workers, lower cluster.workers, or "
                "wait until one of those runs has ended"
            )
        if not is_noted:
            progress.note(f"waiting for workers: {used} of the cluster")
            is_noted = True
        time.sleep(_INTERVAL)


def start_lost_workers(client: Client, cluster: ClusterConfig, group: WorkerGroup) -> str:
    """Start the lost workers of the group again, on a cluster that the run has started by
    ``cluster.spec``.

    Returns the end of the error message for a run for which too few workers come.
    """
    if not cluster.spec or client.cluster is None:
        return ""
    present = client.scheduler_info(n_workers=-1)["workers"]
    lost = {name for name, address in group.members.items() if address not in present}
    start_lost(client.cluster, cluster.workers, lost)
    return no_replacement(cluster.spec, client.cluster)


def remove_unusable_workers(
    client: Client,
    group: WorkerGroup,
    failure: SiirlError | None,
    plugin: str | None,
) -> None:
    """Remove the workers that would block the next launch: those that answer nothing, and those
    whose task never ends.

    Where a nanny has started such a worker, that kills it and starts another. ``plugin`` is the
    name of the plugins of the launch that failed. SilentPeer if the scheduler does not remove a
    worker in time.
    """
    _remove_silent(client, group, failure, plugin)
    if plugin is not None:
        _remove_stuck(client, group, plugin)


def _remove_stuck(client: Client, group: WorkerGroup, plugin: str) -> None:
    """Wait until all tasks of the launch have left the group's workers, and remove those where one
    never does.

    A worker runs one task at a time: the next launch would wait for that one, which may wait for a
    device for ever.
    """
    beats: dict[str, int] = {}
    since: dict[str, float] = {}
    while beats_now := _beats_of_tasks(client, group, plugin):
        now = time.monotonic()
        for address, count in beats_now.items():
            if beats.get(address) != count:
                beats[address] = count
                since[address] = now
        stuck = [address for address in beats_now if now - since[address] >= LEAVE_TIMEOUT]
        if stuck:
            logger.warning(
                "given up, since their task does not return: workers at %s", ", ".join(stuck)
            )
            _remove(client, stuck)
            since.update(dict.fromkeys(stuck, now))
        time.sleep(_INTERVAL)


def _beats_of_tasks(client: Client, group: WorkerGroup, plugin: str) -> dict[str, int]:
    """Return {address: units of work that it has completed} of the workers that still run a task
    of the launch.
    """
    present = client.scheduler_info(n_workers=-1)["workers"]
    addresses = [address for address in group.members.values() if address in present]

    async def ask(address: str) -> int | None:
        try:
            answers = await asyncio.wait_for(
                client.run(beats_inside, plugin, workers=[address]), _CALL_TIMEOUT
            )
        except Exception:  # a worker that is just leaving may break the connection in any way
            return None
        count: int | None = answers[address]
        return count

    async def ask_all() -> list[int | None]:
        return await asyncio.gather(*map(ask, addresses))

    counts: list[int | None] = client.sync(ask_all)
    return {
        address: count
        for address, count in zip(addresses, counts, strict=True)
        if count is not None
    }


def _remove_silent(
    client: Client,
    group: WorkerGroup,
    failure: SiirlError | None,
    plugin: str | None,
) -> None:
    """Remove each worker, of the group or idle, that answers nothing for as long as a peer may be
    silent.

    A worker that was silent for that long before, as its peers have found, has a last chance of two
    seconds.
    """
    timeouts = _answer_timeouts(client, group, plugin, was_silent=isinstance(failure, SilentPeer))
    answered: list[bool] = client.sync(_answer_all, client, timeouts)
    silent = [
        address
        for address, has_answered in zip(timeouts, answered, strict=True)
        if not has_answered
    ]
    if silent:
        logger.warning("given up, since they answer nothing: workers at %s", ", ".join(silent))
        _remove(client, silent)


def _answer_timeouts(
    client: Client,
    group: WorkerGroup,
    plugin: str | None,
    *,
    was_silent: bool,
) -> dict[str, float]:
    """Return the seconds within which the worker at each address has to answer.

    ``was_silent``: peers have found a worker silent. Its last heartbeat is then older than the
    others'.
    """
    members = group.members.values()
    idle: dict[str, str] = complete(client, lambda: client.run_on_scheduler(free_workers, plugin))
    patience = DataSettings.of(group.config, members).peer_timeout
    present = client.scheduler_info(n_workers=-1)["workers"]
    last_seen: dict[str, float] = {address: info["last_seen"] for address, info in present.items()}
    silent_since = 0.0
    if was_silent:
        silent_since = max(last_seen.values(), default=0.0) - patience
    timeouts: dict[str, float] = {}
    for address in {*members, *idle.values()} & last_seen.keys():
        is_late = last_seen[address] <= silent_since
        timeouts[address] = min(patience, _LAST_CHANCE) if is_late else patience
    return timeouts


def _remove(client: Client, addresses: Sequence[str]) -> None:
    """Remove workers through the scheduler; their nannies kill them. SilentPeer if it does not do
    so in time.

    A worker without a nanny leaves the cluster and stays as a process.
    """
    remove = partial(SchedulerRpc(client).end_workers, addresses, _STOP_TIMEOUT)
    try:
        complete(client, remove, timeout=_CALL_TIMEOUT)
    except TimeoutError as error:
        raise SilentPeer(
            f"workers at {', '.join(addresses)} are of no use, and the scheduler has not removed "
            f"them: {error}"
        ) from error


async def _answer_all(client: Client, timeouts: Mapping[str, float]) -> list[bool]:
    """Return whether the worker at each address answers within its timeout in seconds."""

    async def answers(address: str, timeout: float) -> bool:
        try:
            await asyncio.wait_for(client.run(time.time, workers=[address]), timeout)
        except Exception:  # a worker that is just leaving may break the connection in any way
            return False
        return True

    return await asyncio.gather(
        *(answers(address, timeout) for address, timeout in timeouts.items())
    )
