"""Lets an elastic run go on with fewer workers when some are lost, and with more when some have joined."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.driver.calls import complete
from siirl_dask.driver.iterations import until_asked
from siirl_dask.driver.phases import Phases
from siirl_dask.driver.processes import check_alike, rank_order, workers_needed
from siirl_dask.driver.reachable import check_reachable
from siirl_dask.driver.replacement import give_up_silent, start_lost_workers
from siirl_dask.driver.worker_group import Planner, WorkerGroup
from siirl_dask.errors import ConfigError, RunError, SiirlError, UserError, WorkerLeft, WorkerLost, WorkersJoined
from siirl_dask.observe import Progress
from siirl_dask.planner import Iteration
from siirl_dask.planner.resizing import Kind, Kinds, kinds_of, placement_of
from siirl_dask.worker.idle_workers import free_workers
from siirl_dask.worker.report import Report, report

logger = logging.getLogger("siirl_dask.driver")
_GLANCE = 0.2  # seconds between two looks
_REPLACEMENT_TIMEOUT = 10.0  # seconds, where cluster.replacement_timeout is not given
_REPORT_TIMEOUT = 30.0  # seconds for a worker that has just started to say what it runs on


class Elastic:
    """Worker groups of an elastic run: every worker that is idle, up to ``cluster.max_workers``.

    Workers that are left keep their roles; see ``planner/resizing.py`` for the others.
    """

    def __init__(self, config: Config, plan: Planner, reads: Mapping[str, Sequence[str]], progress: Progress) -> None:
        """``reads`` has the folders that the workers of each role read."""
        self._config, self._plan, self._reads, self._progress = config, plan, reads, progress
        self._kinds = Kinds.of(config.cluster.placement, config.cluster.workers)
        self._reports: dict[str, Report | Exception] = {}
        self._refused: set[str] = set()
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
        give_up_silent(client, group, failure, own)
        if not isinstance(failure, WorkersJoined):
            start_lost_workers(client, cluster, group)
        in_order = isinstance(failure, (WorkersJoined, WorkerLeft))
        given = cluster.replacement_timeout
        patience = 0.0 if in_order else _REPLACEMENT_TIMEOUT if given is None else given
        found = self._await(client, group, own, len(group.members), patience)
        self._tell(len(group.members), len(found.members), patience)
        return found

    def look(self, client: Client, group: WorkerGroup, own: str) -> Callable[[], None] | None:
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

    def cut(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        return until_asked(iterations, lambda: bool(self._joined), self._config.run.steps)

    def check(self, steps: int, since: float) -> None:
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
        return f"{len(there)} workers are free after {timeout:g} s, too few for the roles of the run{why}"

    def _there(self, client: Client, own: str | None) -> dict[str, str]:
        """Return {name: address} of the workers that the run may use; those it has been refused are left out."""
        there: dict[str, str] = complete(client, lambda: client.run_on_scheduler(free_workers, own))
        return {name: address for name, address in there.items() if address not in self._refused}

    def _choose(self, client: Client, group: WorkerGroup | None, there: Mapping[str, str]) -> WorkerGroup | None:
        """Return a group of as many of the workers that are ``there`` as a plan can be made for; None if for none.

        ConfigError if those with which the run begins do not fit to each other.
        """
        self._ask(client, there.values())
        if group is None:
            group = self._first(client, there)
        known = {*group.members.values()}
        new = {name: address for name, address in there.items() if address not in known}
        left_out = self._unlike(client, new)
        usable = {name: address for name, address in there.items() if name not in left_out}
        while True:
            chosen = self._largest(group, usable)
            if chosen is None:
                return None
            found, phases = chosen
            cut_off = self._cut_off(client, {name: new[name] for name in found.members if name in new}, phases)
            if not cut_off:
                return found
            usable = {name: address for name, address in usable.items() if name not in cut_off}

    def _first(self, client: Client, there: Mapping[str, str]) -> WorkerGroup:
        """Return the group with which the run begins if no more workers are there than it was told to take."""
        names = self._in_order(there)[: self._config.cluster.workers]
        members = {name: there[name] for name in names}
        with workers_needed(client, members):
            check_alike(client, members, self._reports)
        return WorkerGroup(members, self._config)

    def _largest(self, group: WorkerGroup, there: Mapping[str, str]) -> tuple[WorkerGroup, Phases] | None:
        cluster, before = self._config.cluster, _kinds(group)
        new = self._in_order({name: address for name, address in there.items() if name not in before})
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

    def _in_order(self, workers: Mapping[str, str]) -> list[str]:
        return rank_order({name: (address, self._reports.get(address)) for name, address in workers.items()})

    def _ask(self, client: Client, addresses: Iterable[str]) -> None:
        """Have workers that have not answered before say what they run on."""
        new = [address for address in addresses if isinstance(self._reports.get(address, OSError()), OSError)]
        self._reports |= dict(zip(new, complete(client, lambda: _reports(client, new)), strict=True))

    def _unlike(self, client: Client, new: Mapping[str, str]) -> set[str]:
        """Return the names of newcomers that do not answer, or do not fit to this process: those are refused."""
        unlike = {name for name, address in new.items() if isinstance(self._reports[address], OSError)}
        for name, address in new.items():
            if name in unlike:
                continue
            try:
                check_alike(client, {name: address}, self._reports)
            except ConfigError as error:
                unlike.add(name)
                self._refuse(name, address, error)
        return unlike

    def _cut_off(self, client: Client, new: Mapping[str, str], phases: Phases) -> set[str]:
        """Return the names of newcomers that have left, and of those, which it refuses, that do not reach the files."""
        cut_off: set[str] = set()
        with suppress(ConfigError, WorkerLost):
            self._check_reachable(client, new, phases)
            return cut_off
        for name, address in new.items():
            try:
                self._check_reachable(client, {name: address}, phases)
            except WorkerLost:
                cut_off.add(name)
            except ConfigError as error:
                cut_off.add(name)
                self._refuse(name, address, error)
        return cut_off

    def _check_reachable(self, client: Client, new: Mapping[str, str], phases: Phases) -> None:
        with workers_needed(client, new):
            check_reachable(client, new, phases, self._reads, self._config.run.url)

    def _refuse(self, name: str, address: str, error: ConfigError) -> None:
        self._refused.add(address)
        logger.warning("worker %r at %s is left out: %s", name, address, error)

    def _tell(self, before: int, now: int, patience: float) -> None:
        """Tell the user of another number of workers, which was waited for ``patience`` seconds if it is lower."""
        if now != before:
            waited = f": no other came within {patience:g} s" if patience and now < before else ""
            self._progress.note(f"going on with {now} worker{'s' if now > 1 else ''} instead of {before}{waited}")


def _kinds(group: WorkerGroup) -> dict[str, Kind]:
    kinds = kinds_of(group.config.cluster.placement, range(len(group.members)))
    return {name: kinds[index] for index, name in enumerate(group.members)}


async def _reports(client: Client, addresses: Sequence[str]) -> list[Report | Exception]:
    async def ask(address: str) -> Report | Exception:
        try:
            answers = await asyncio.wait_for(client.run(report, workers=[address]), _REPORT_TIMEOUT)
        except Exception as error:  # whatever an import there may raise; it may have left, or stand still
            return error
        answer: Report = answers[address]
        return answer

    return await asyncio.gather(*map(ask, addresses))
