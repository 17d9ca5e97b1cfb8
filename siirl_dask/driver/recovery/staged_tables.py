"""Collects the workers' reports of the tables that they write while steps go on, until each
table is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl_storage import Part, parse_part

from siirl_dask.context import Metric
from siirl_dask.driver.iterations import StagedTable
from siirl_dask.observe import merge, unpack
from siirl_dask.planner import Iteration, Phase

Key = tuple[int, str]
"""Sequence number of an iteration, and the name of a table."""


class StagedTables:
    """The tables that are being written, by iteration. ``workers`` are all workers, in rank
    order.
    """

    def __init__(self, workers: Iterable[str]) -> None:
        self._workers = list(workers)
        self._staging: dict[Key, _Staging] = {}
        self._complete: set[Key] = set()  # of iterations that have not ended
        self._ended = -1
        self._awaited: set[Key] = set()  # of iterations that are done except for their tables

    @property
    def first_awaited(self) -> int | None:
        """Sequence number of the first iteration that is done except for its tables; None if
        there is none.
        """
        return min((sequence for sequence, _ in self._awaited), default=None)

    def report(self, event: Mapping[str, Any]) -> None:
        """Add a worker's report. StorageError or ValueError for one that is malformed."""
        phase, step, sequence = event["iteration"]
        key = (sequence, event["table"])
        staging = self._staging.setdefault(
            key, _Staging(Iteration(Phase(phase), step, sequence), event["table"])
        )
        staging.reports[event["member"]] = _Report.of(event)

    def await_tables(self, sequence: int, tables: Iterable[str]) -> None:
        """Add the tables of an iteration that a worker has completed except for these."""
        keys = {(sequence, table) for table in tables}
        self._awaited |= keys - self._complete

    def end(self, sequence: int) -> None:
        """Record that all workers have completed an iteration except for its tables; iterations
        end in order.
        """
        self._ended = sequence
        self._complete = {key for key in self._complete if key[0] > sequence}

    def pop(self) -> StagedTable | None:
        """Return a table of which all workers have reported, once; None if there is none."""
        for key, staging in self._staging.items():
            if len(staging.reports) < len(self._workers):
                continue
            del self._staging[key]
            self._awaited.discard(key)
            if key[0] > self._ended:
                self._complete.add(key)
            return staging.table_of(self._workers)
        return None


@dataclass(frozen=True, slots=True)
class _Report:
    """A worker's report of its part of a table."""

    part: Part | None
    """None from a worker that has no part of it."""
    metrics: dict[str, Metric]
    position: int | None

    @staticmethod
    def of(event: Mapping[str, Any]) -> _Report:
        """Return the report in a worker's event. StorageError or ValueError for one that is
        malformed.
        """
        text = event.get("part")
        part = None
        if text is not None:
            part = parse_part(json.loads(text))
        return _Report(part, unpack(event["metrics"]), event["position"])


@dataclass(slots=True)
class _Staging:
    """A table of a step that is being written, and the reports of the workers that have done
    their part.
    """

    iteration: Iteration
    table: str
    reports: dict[str, _Report] = field(default_factory=dict)

    def table_of(self, workers: Iterable[str]) -> StagedTable:
        """Return the table, once all ``workers`` have reported."""
        reports = [self.reports[worker] for worker in workers]
        return StagedTable(
            iteration=self.iteration,
            table=self.table,
            parts=[report.part for report in reports if report.part is not None],
            metrics=merge([report.metrics for report in reports]),
            position=max(
                (report.position for report in reports if report.position is not None), default=None
            ),
        )
