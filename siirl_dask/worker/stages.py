"""Writes a worker's part of each table that the run saves, while the chain goes on, and reports it
to the driver.

A part counts once the driver has committed it with those of the other workers (runs/tables.py). It
is reported as soon as it is written, also in the middle of a step: the rows that a step has stored
then survive a failure of that step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from siirl_storage import part_entry, stage_part, write_part

from siirl_dask.config import Durability
from siirl_dask.context import Metric
from siirl_dask.observe import pack
from siirl_dask.planner import Iteration, Save, SaveState
from siirl_dask.tables import step_folder
from siirl_dask.trace import Lane, Recorder
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.stop import StopFlag, result_of


@dataclass(frozen=True, slots=True)
class StepProgress:
    """A worker's progress in a step when it saves a table."""

    metrics: Mapping[str, Metric]
    """Metrics logged so far."""
    position: int | None
    """Number of its dataloader's next prompt; None while it follows from the step."""


@dataclass(slots=True, kw_only=True)
class StageWriter:
    """Writes parts for one attempt at a run, one after the other. Only the chain's thread calls
    it.
    """

    run_url: str
    attempt: int
    """Number of this start of the run, which the parts carry."""
    durability: Durability
    report: Callable[[dict[str, Any]], None]
    """Sends an event to the driver, from any thread."""
    stop: StopFlag
    trace: Recorder = field(default_factory=lambda: Recorder(enabled=False))
    _writing: Future[None] | None = None
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "siirl-stages")
    )

    @property
    def reports(self) -> bool:
        """Whether each table that is saved is reported to the driver."""
        return self.durability is not Durability.none

    def save(
        self,
        link: Save | SaveState,
        iteration: Iteration,
        rows: pa.Table,
        progress: StepProgress,
    ) -> None:
        """Write ``rows`` as this worker's part of a table, and report it with the step's
        ``progress``.

        With ``storage.durability=sync`` it is written when this returns; with ``async`` the
        previous part is. A write that fails is reported at once; this raises its error if it was
        this part's or the previous one's.
        """
        if not self.reports:
            return
        folder = step_folder(self.run_url, link.table, iteration.step)
        event = _event(iteration, link.table, progress)

        def write() -> None:
            started = time.monotonic_ns()
            try:
                part = stage_part(folder, self.attempt, link.index, rows)
            except Exception as error:
                # each store has errors of its own; the chain may be far away, or at its end
                what = (
                    f"{iteration}: its rows could not be stored in {folder}: "
                    f"{type(error).__name__}: {error}"
                )
                self.report({"kind": "unstored", "what": what})
                raise
            self.trace.add(Lane.STORAGE, "write", link.table, started, amount=part.nbytes)
            self.report({**event, "part": json.dumps(part_entry(part))})

        self.wait()
        self._writing = self._thread.submit(write)
        if self.durability is Durability.sync:
            self.wait()

    def report_no_part(self, table: str, iteration: Iteration, progress: StepProgress) -> None:
        """Report the step's ``progress`` for a table of which this worker has no part."""
        if self.reports:
            self.report(_event(iteration, table, progress))

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of the last write; Aborted when the
        run is stopped.
        """
        if self._writing is not None:
            result_of(self._writing, self.stop)

    def close(self) -> None:
        """Accept no more parts; one that is being written appears whole or not at all."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class PlainWriter:
    """Writes parts of a pass that nothing commits: their names contain their number and count."""

    run_url: str
    reports: bool = False
    """Always False: no driver waits for a part."""

    def save(
        self,
        link: Save | SaveState,
        iteration: Iteration,
        rows: pa.Table,
        progress: StepProgress,
    ) -> None:
        """Write ``rows`` as part ``link.index`` of ``link.count``."""
        write_part(
            step_folder(self.run_url, link.table, iteration.step), link.index, link.count, rows
        )

    def report_no_part(self, table: str, iteration: Iteration, progress: StepProgress) -> None:
        """Do nothing: nobody commits the table."""

    def close(self) -> None:
        """Do nothing."""


def table_writer(
    spec: RunSpec,
    report: Callable[[dict[str, Any]], None],
    stop: StopFlag,
    trace: Recorder,
) -> StageWriter | PlainWriter:
    """Return what writes a run's tables; ``report`` is called in any thread."""
    if spec.attempt is None:
        return PlainWriter(spec.url)
    return StageWriter(
        run_url=spec.url,
        attempt=spec.attempt,
        durability=spec.durability,
        report=report,
        stop=stop,
        trace=trace,
    )


def _event(iteration: Iteration, table: str, progress: StepProgress) -> dict[str, Any]:
    return {
        "kind": "staged",
        "iteration": (str(iteration.phase), iteration.step, iteration.sequence),
        "table": table,
        "metrics": pack(progress.metrics),
        "position": progress.position,
    }
