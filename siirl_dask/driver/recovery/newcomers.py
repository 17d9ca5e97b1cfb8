"""Examines workers before an elastic run takes them in: it refuses those that do not fit or do
not reach its files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from distributed import Client

from siirl_dask.driver.checks.reachable import check_reachable
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.clusters.processes import check_alike, rank_order, workers_needed
from siirl_dask.driver.phases import Phases
from siirl_dask.errors import ConfigError, WorkerLost
from siirl_dask.worker.process.report import Report, report

logger = logging.getLogger("siirl_dask.driver")
_REPORT_TIMEOUT = 30.0  # seconds for a worker that has just started to report what it runs on


class Newcomers:
    """Stores the reports of workers on what they run on. Arguments that are mappings of workers
    are {name: address}.
    """

    def __init__(self, reads: Mapping[str, Sequence[str]], run_url: str) -> None:
        """``reads`` has the folders that the workers of each role read."""
        self._reads = reads
        self._run_url = run_url
        self._reports: dict[str, Report | Exception] = {}
        self.refused: set[str] = set()
        """Addresses of workers that the run never takes."""

    def ask(self, client: Client, addresses: Iterable[str]) -> None:
        """Ask workers that have not answered before for their reports."""
        new = [
            address
            for address in addresses
            if isinstance(self._reports.get(address, OSError()), OSError)
        ]
        reports = complete(client, lambda: _ask_all(client, new))
        self._reports.update(zip(new, reports, strict=True))

    def in_order(self, workers: Mapping[str, str]) -> list[str]:
        """Return the names in rank order."""
        return rank_order(
            {name: (address, self._reports.get(address)) for name, address in workers.items()}
        )

    def check_alike(self, client: Client, workers: Mapping[str, str]) -> None:
        """Raise ConfigError unless the workers fit to each other; WorkerLost for one that has
        left.
        """
        with workers_needed(client, workers):
            check_alike(client, workers, self._reports)

    def unlike(self, client: Client, new: Mapping[str, str]) -> set[str]:
        """Return the names of newcomers that do not answer, or do not fit to this process; the
        latter are refused.
        """
        unlike: set[str] = set()
        for name, address in new.items():
            if isinstance(self._reports[address], OSError):
                unlike.add(name)
                continue
            try:
                check_alike(client, {name: address}, self._reports)
            except ConfigError as error:
                unlike.add(name)
                self._refuse(name, address, error)
        return unlike

    def cut_off(self, client: Client, new: Mapping[str, str], phases: Phases) -> set[str]:
        """Return the names of newcomers that have left or do not reach the files; the latter are
        refused.
        """
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
            check_reachable(client, new, phases, self._reads, self._run_url)

    def _refuse(self, name: str, address: str, error: ConfigError) -> None:
        self.refused.add(address)
        logger.warning("worker %r at %s is left out: %s", name, address, error)


async def _ask_all(client: Client, addresses: Sequence[str]) -> list[Report | Exception]:
    async def ask(address: str) -> Report | Exception:
        try:
            answers = await asyncio.wait_for(client.run(report, workers=[address]), _REPORT_TIMEOUT)
        except Exception as error:
            # whatever an import there may raise; it may have left, or stand still
            return error
        answer: Report = answers[address]
        return answer

    return await asyncio.gather(*map(ask, addresses))
