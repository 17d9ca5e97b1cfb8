"""Lets an elastic run go on with fewer workers when some are lost, and with more when some have joined."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.driver.calls import complete
from siirl_dask.driver.iterations import until_asked
from siirl_dask.driver.newcomers import Newcomers
from siirl_dask.driver.phases import Phases
from siirl_dask.driver.replacement import give_up, start_lost_workers
from siirl_dask.driver.worker_group import Planner, WorkerGroup
from siirl_dask.errors import RunError, SiirlError, UserError, WorkerLeft, WorkersJoined
from siirl_dask.observe import Progress
from siirl_dask.planner import Iteration
from siirl_dask.planner.resizing import Kind, Kinds, kinds_of, placement_of
from siirl_dask.worker.idle_workers import free_workers

logger = logging.getLogger("siirl_dask.driver")
_GLANCE = 0.2  # seconds between two looks
_REPLACEMENT_TIMEOUT = 10.0  # seconds, where cluster.replacement_timeout is not given


class Elastic:
    """Worker groups of an elastic run: every worker that is idle, up to ``cluster.max_workers``.

    Workers that are left keep their roles; see ``planner/resizing.py`` for the others.
    """

    def __init__(self, config: Config, plan: Planner, reads: Mapping[str, Sequence[str]], progress: Progress) -> None:
        """``reads`` has the folders that the workers of each role read."""
        self._config, self._plan, self._progress = config, plan, progress
        self._kinds = Kinds.of(config.cluster.placement, config.cluster.workers)
        self._newcomers = Newcomers(reads, config.run.url)
        self._joined: list[str] = []
        self._tries = 0
        self._changing = threading.Lock()
        """Held where ``_tries`` and ``_joined`` change: a look may end when its try is over."""
        self._why: UserError | None = None

    def find(
        self, client: Client, group: WorkerGroup | None, failure: SiirlError | None, own: str | None
    ) -> WorkerGroup:
        with self._changing:
            self._tries, self._joined = self._tries + 1, []
        cluster = self._config.cluster
        if group is None:
            return self._await(client, None, None, cluster.workers, cluster.start_timeout)
        give_up(client, group, failure, own)
        if not isinstance(failure, WorkersJoined):
            start_lost_workers(client, cluster, group)
        in_order = isinstance(failure, (WorkersJoined, WorkerLeft))
        given = cluster.replacement_timeout
        patience = 0.0 if in_order else _REPLACEMENT_TIMEOUT if given is None else given
        found = self._await(client, group, own, len(group.members), patience)
        self._tell(len(group.members), len(found.members), patience)
        return found

    def on_idle(self, client: Client, group: WorkerGroup, own: str) -> Callable[[], None] | None:
        tries = self._tries

        def work() -> None:
            try:
                chosen = self._choose(client, group, self._there(client, own))
            except Exception as error:  # the run may be ending, and its client be closed
                logger.info("idle workers are not taken in: %s: %s", type(error).__name__, error)
                return
            if chosen is None or len(chosen.members) <= len(group.members):
                return
            with self._changing:
                if tries == self._tries:
                    self._joined = [name for name in chosen.members if name not in group.members]

        return lambda: threading.Thread(target=work, name="look-at-idle-workers", daemon=True).start()

    def until_change(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        return until_asked(iterations, lambda: bool(self._joined), self._config.run.steps)

    def check_change(self, steps: int, since: float) -> None:
        if not self._joined or steps >= self._config.run.steps:
            return
        names, workers = ", ".join(map(repr, self._joined)), "workers" if len(self._joined) > 1 else "worker"
        joined = WorkersJoined(f"taking in {len(self._joined)} more {workers} after step {steps}: {names}")
        joined.since = since
        raise joined

    def _await(
        self, client: Client, group: WorkerGroup | None, own: str | None, enough: int, patience: float
    ) -> WorkerGroup:
        """Return a group of ``enough`` workers or more; after ``patience`` seconds one of as many as there are.

        RunError if they are still too few for any plan after ``cluster.start_timeout``.
        """
        began = time.monotonic()
        seen: dict[str, str] | None = None
        timeout = max(self._config.cluster.start_timeout, patience)
        with self._progress.arrivals(enough) as show:
            while True:
                there = self._there(client, own)
                show(min(len(there), enough))
                waited = time.monotonic() - began
                ready = len(there) >= enough or (group is not None and waited >= patience)
                if ready and there != seen:
                    seen = there
                    if (chosen := self._choose(client, group, there)) is not None:
                        return chosen
                    if group is None and self._why is not None:
                        raise self._why
                if waited >= timeout:
                    raise RunError(self._too_few(there, timeout))
                time.sleep(_GLANCE)

    def _too_few(self, there: Mapping[str, str], timeout: float) -> str:
        why = f": {self._why}" if self._why is not None else ""
        workers = "1 worker is" if len(there) == 1 else f"{len(there)} workers are"
        return f"{workers} free after {timeout:g} s, too few for the roles of the run{why}"

    def _there(self, client: Client, own: str | None) -> dict[str, str]:
        """Return {name: address} of the workers that the run may use; those it has been refused are left out."""
        there: dict[str, str] = complete(client, lambda: client.run_on_scheduler(free_workers, own))
        return {name: address for name, address in there.items() if address not in self._newcomers.refused}

    def _choose(self, client: Client, group: WorkerGroup | None, there: Mapping[str, str]) -> WorkerGroup | None:
        """Return a group of as many of the workers that are ``there`` as a plan can be made for; None if for none.

        ConfigError if those with which the run begins do not fit to each other.
        """
        self._newcomers.ask(client, there.values())
        if group is None:
            group = self._first(client, there)
        known = {*group.members.values()}
        new = {name: address for name, address in there.items() if address not in known}
        left_out = self._newcomers.unlike(client, new)
        while (chosen := self._largest(group, _without(left_out, there))) is not None:
            found, phases = chosen
            taken_in = {name: new[name] for name in found.members if name in new}
            cut_off = self._newcomers.cut_off(client, taken_in, phases)
            if not cut_off:
                return found
            left_out |= cut_off
        return None

    def _first(self, client: Client, there: Mapping[str, str]) -> WorkerGroup:
        """Return the group with which the run begins if no more workers are there than it was told to take."""
        names = self._newcomers.in_order(there)[: self._config.cluster.workers]
        members = {name: there[name] for name in names}
        self._newcomers.check_alike(client, members)
        return WorkerGroup(members, self._config)

    def _largest(self, group: WorkerGroup, there: Mapping[str, str]) -> tuple[WorkerGroup, Phases] | None:
        cluster, before = self._config.cluster, _kinds(group)
        new = self._newcomers.in_order(_without(before, there))
        names = [*(name for name in group.members if name in there), *new]
        for count in range(min(len(names), cluster.max_workers or len(names)), 0, -1):
            for kinds in self._kinds.assign(before, names, count):
                placement = placement_of(kinds, [*kinds], cluster.placement)
                resized = replace(self._config, cluster=replace(cluster, workers=count, placement=placement))
                chosen = WorkerGroup({name: there[name] for name in kinds}, resized)
                try:
                    return chosen, self._plan(chosen)
                except UserError as error:
                    self._why = error
        return None

    def _tell(self, before: int, now: int, patience: float) -> None:
        """Tell the user of another number of workers, which was waited for ``patience`` seconds if it is lower."""
        if now != before:
            waited = f": no other came within {patience:g} s" if patience and now < before else ""
            self._progress.note(f"going on with {now} worker{'s' if now > 1 else ''} instead of {before}{waited}")


def _kinds(group: WorkerGroup) -> dict[str, Kind]:
    kinds = kinds_of(group.config.cluster.placement, range(len(group.members)))
    return {name: kinds[index] for index, name in enumerate(group.members)}


def _without(names: Collection[str], workers: Mapping[str, str]) -> dict[str, str]:
    return {name: address for name, address in workers.items() if name not in names}
