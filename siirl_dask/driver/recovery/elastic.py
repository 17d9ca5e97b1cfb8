"""Lets an elastic run go on with fewer workers when some are lost, and with more when some have
joined.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.phases import Phases
from siirl_dask.driver.recovery.newcomers import Newcomers
from siirl_dask.driver.recovery.replacement import remove_unusable_workers, start_lost_workers
from siirl_dask.driver.recovery.resizing import Kind, Kinds, kinds_of, placement_of
from siirl_dask.driver.recovery.worker_group import Planner, WorkerGroup
from siirl_dask.errors import RunError, SiirlError, UserError, WorkerLeft, WorkersJoined
from siirl_dask.observe import Progress
from siirl_dask.planner import Iteration, Phase
from siirl_dask.scheduler import free_workers

logger = logging.getLogger("siirl_dask.driver")
_INTERVAL = 0.2  # seconds between two looks at the cluster
_REPLACEMENT_TIMEOUT = 10.0  # seconds, where cluster.replacement_timeout is not set


class ElasticWorkers:
    """Worker groups of an elastic run: every worker that is idle, up to ``cluster.max_workers``.

    Workers that are left keep their roles; see ``driver/recovery/resizing.py`` for the others.
    """

    def __init__(
        self,
        config: Config,
        plan: Planner,
        reads: Mapping[str, Sequence[str]],
        progress: Progress,
        check: Callable[[], None],
    ) -> None:
        """``reads`` has the folders that the workers of each role read. ``check`` is called while
        workers are waited for, and may raise.
        """
        self._config = config
        self._plan = plan
        self._progress = progress
        self._check = check
        self._kinds = Kinds.of(config.cluster.placement, config.cluster.workers)
        self._newcomers = Newcomers(reads, config.run.url)
        self._changing = threading.Lock()
        """Held where ``_launches`` and ``_joined`` change: a look at idle workers may end after
        its launch has."""
        self._launches = 0
        self._joined: list[str] = []
        """Names of the workers with which the run is to be launched again."""
        self._plan_error: UserError | None = None
        """Why the last group of workers for which no plan could be made does not work."""

    def find(
        self,
        client: Client,
        group: WorkerGroup | None,
        failure: SiirlError | None,
        plugin: str | None,
    ) -> WorkerGroup:
        with self._changing:
            self._launches += 1
            self._joined = []
        cluster = self._config.cluster
        if group is None:
            return self._await(client, None, None, cluster.workers, cluster.start_timeout)
        remove_unusable_workers(client, group, failure, plugin)
        if not isinstance(failure, WorkersJoined):
            start_lost_workers(client, cluster, group)
        # nobody is lost, so nobody is waited for
        if isinstance(failure, (WorkersJoined, WorkerLeft)):
            patience = 0.0
        elif cluster.replacement_timeout is None:
            patience = _REPLACEMENT_TIMEOUT
        else:
            patience = cluster.replacement_timeout
        found = self._await(client, group, plugin, len(group.members), patience)
        self._note_change(len(group.members), len(found.members), patience)
        return found

    def on_idle(self, client: Client, group: WorkerGroup, plugin: str) -> Callable[[], None] | None:
        launches = self._launches

        def look() -> None:
            try:
                resized = self._choose(client, group, self._available(client, plugin))
            except Exception as error:  # the run may be ending, and its client be closed
                logger.info("idle workers are not taken in: %s: %s", type(error).__name__, error)
                return
            if resized is None or len(resized.members) <= len(group.members):
                return
            with self._changing:
                if launches == self._launches:
                    self._joined = [name for name in resized.members if name not in group.members]

        return lambda: threading.Thread(
            target=look,
            name="look-at-idle-workers",
            daemon=True,
        ).start()

    def until_change(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        return until_stopped(iterations, lambda: bool(self._joined), self._config.run.steps)

    def check_change(self, steps: int, since: float) -> None:
        if not self._joined or steps >= self._config.run.steps:
            return
        names = ", ".join(map(repr, self._joined))
        workers = "worker"
        if len(self._joined) > 1:
            workers = "workers"
        joined = WorkersJoined(
            f"taking in {len(self._joined)} more {workers} after step {steps}: {names}"
        )
        joined.since = since
        raise joined

    def _await(
        self,
        client: Client,
        group: WorkerGroup | None,
        plugin: str | None,
        enough: int,
        patience: float,
    ) -> WorkerGroup:
        """Return a group of ``enough`` workers or more; after ``patience`` seconds one of as many
        as there are.

        RunError if they are still too few for any plan after ``cluster.start_timeout``.
        """
        began = time.monotonic()
        tried: dict[str, str] | None = None
        timeout = max(self._config.cluster.start_timeout, patience)
        with self._progress.arrivals(enough) as show:
            while True:
                available = self._available(client, plugin)
                show(min(len(available), enough))
                waited = time.monotonic() - began
                is_enough = len(available) >= enough
                if group is not None and waited >= patience:
                    is_enough = True
                if is_enough and available != tried:
                    tried = available
                    found = self._choose(client, group, available)
                    if found is not None:
                        return found
                    if group is None and self._plan_error is not None:
                        raise self._plan_error
                self._check()
                if waited >= timeout:
                    raise RunError(self._too_few(available, timeout))
                time.sleep(_INTERVAL)

    def _too_few(self, available: Mapping[str, str], timeout: float) -> str:
        why = ""
        if self._plan_error is not None:
            why = f": {self._plan_error}"
        workers = "1 worker is"
        if len(available) != 1:
            workers = f"{len(available)} workers are"
        return f"{workers} free after {timeout:g} s, too few for the roles of the run{why}"

    def _available(self, client: Client, plugin: str | None) -> dict[str, str]:
        """Return {name: address} of the workers that the run may use; those that it has refused
        are left out.
        """
        resources = self._config.cluster.resources
        free: dict[str, str] = complete(
            client, lambda: client.run_on_scheduler(free_workers, plugin, resources)
        )
        return {
            name: address
            for name, address in free.items()
            if address not in self._newcomers.refused
        }

    def _choose(
        self,
        client: Client,
        group: WorkerGroup | None,
        available: Mapping[str, str],
    ) -> WorkerGroup | None:
        """Return a group of as many of the ``available`` workers as a plan can be made for; None if
        for none.

        ConfigError if those with which the run begins do not fit to each other.
        """
        self._newcomers.ask(client, available.values())
        if group is None:
            group = self._first(client, available)
        known = set(group.members.values())
        new = {name: address for name, address in available.items() if address not in known}
        excluded = self._newcomers.unlike(client, new)
        while (found := self._largest(group, _without(excluded, available))) is not None:
            resized, phases = found
            taken_in = {name: new[name] for name in resized.members if name in new}
            cut_off = self._newcomers.cut_off(client, taken_in, phases)
            if not cut_off:
                return resized
            excluded |= cut_off
        return None

    def _first(self, client: Client, available: Mapping[str, str]) -> WorkerGroup:
        """Return the group with which the run begins if no more workers are there than
        ``cluster.workers``.
        """
        names = self._newcomers.in_order(available)[: self._config.cluster.workers]
        members = {name: available[name] for name in names}
        self._newcomers.check_alike(client, members)
        return WorkerGroup(members, self._config)

    def _largest(
        self, group: WorkerGroup, available: Mapping[str, str]
    ) -> tuple[WorkerGroup, Phases] | None:
        """Return the largest group for which a plan can be made, with its plans; members of
        ``group`` come first.
        """
        cluster = self._config.cluster
        before = _kinds(group)
        names = [name for name in group.members if name in available]
        names += self._newcomers.in_order(_without(before, available))
        most = len(names)
        if cluster.max_workers:
            most = min(most, cluster.max_workers)
        for count in range(most, 0, -1):
            for kinds in self._kinds.assign(before, names, count):
                placement = placement_of(kinds, list(kinds), cluster.placement)
                config = replace(
                    self._config, cluster=replace(cluster, workers=count, placement=placement)
                )
                resized = WorkerGroup({name: available[name] for name in kinds}, config)
                try:
                    return resized, self._plan(resized)
                except UserError as error:
                    self._plan_error = error
        return None

    def _note_change(self, before: int, now: int, patience: float) -> None:
        """Show another number of workers to the user; a lower one was waited for ``patience``
        seconds.
        """
        if now == before:
            return
        waited = ""
        if patience and now < before:
            waited = f": no other came within {patience:g} s"
        self._progress.note(
            f"going on with {now} worker{'s' if now > 1 else ''} instead of {before}{waited}"
        )


def _kinds(group: WorkerGroup) -> dict[str, Kind]:
    kinds = kinds_of(group.config.cluster.placement, range(len(group.members)))
    return {name: kinds[index] for index, name in enumerate(group.members)}


def _without(names: Collection[str], workers: Mapping[str, str]) -> dict[str, str]:
    return {name: address for name, address in workers.items() if name not in names}


def until_stopped(
    iterations: Iterable[Iteration], should_stop: Callable[[], bool], steps: int
) -> Iterator[Iteration]:
    """Yield the iterations; once ``should_stop()`` is true, end after a training step, its
    validation and checkpoint.

    That step drains the pipeline. A stop that is asked for after the last of all ``steps`` cuts
    nothing off: the final validation, checkpoint and test run as well.
    """
    stopping = False
    step = 0
    for iteration in iterations:
        kind = iteration.phase.counts_as
        if kind is Phase.TRAIN:
            if stopping:
                yield Iteration(Phase.CHECKPOINT, step, iteration.sequence)
                return
            step = iteration.step
            if should_stop() and step < steps:
                stopping = True
                iteration = replace(iteration, drain=True)
        elif kind in (Phase.VALIDATION, Phase.CHECKPOINT) and not stopping and 0 < step < steps:
            stopping = should_stop()
        yield iteration
        if stopping and kind is Phase.CHECKPOINT:
            return
