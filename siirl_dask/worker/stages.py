"""Writes a worker's part of each table that the run saves, beside the chain or in it, and reports it to the driver.

A part counts once the driver has committed it with those of the other workers (runs/tables.py). So the driver learns of
it as soon as it is written, also while the step goes on: what a step has stored then outlives a failure of that step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from siirl_storage import stage_part, write_part
from siirl_storage.manifest import part_entry

from siirl_dask.config import Durability
from siirl_dask.context import Metric
from siirl_dask.coordinator.stored_rows import step_folder
from siirl_dask.observe.metrics import pack
from siirl_dask.planner import Iteration, Keep, Save
from siirl_dask.trace import Lane, Recorder
from siirl_dask.worker.stop import StopFlag, finished


@dataclass(frozen=True, slots=True)
class SoFar:
    """A worker's progress in a step when it saves a table."""

    metrics: Mapping[str, Metric]
    """Metrics logged so far."""
    position: int | None
    """Number of its dataloader's next prompt; None while it follows from the step."""


@dataclass(slots=True, kw_only=True)
class StageWriter:
    """Writes parts for one attempt at a run, one after the other. Its methods belong to the chain's thread."""

    run_url: str
    attempt: int
    """Number of this start of the run, which the parts carry."""
    durability: Durability
    report: Callable[[dict[str, Any]], None]
    """Sends an event to the driver, from any thread."""
    stop: StopFlag
    trace: Recorder = field(default_factory=lambda: Recorder(enabled=False))
    _writing: Future[None] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "siirl-stages"))

    @property
    def reports(self) -> bool:
        """Whether the driver hears of each table that is saved."""
        return self.durability is not Durability.none

    def save(self, link: Save | Keep, iteration: Iteration, rows: pa.Table, done: SoFar) -> None:
        """Write ``rows`` as this worker's part of a table, and report it with what is ``done`` of the step.

        With ``storage.durability=sync`` it is written when this returns; with ``async`` the one before it is. A write
        that fails is reported at once, and raised here, if it was this one or the one before it.
        """
        if not self.reports:
            return
        folder = step_folder(self.run_url, link.table, iteration.step)
        event = _event(iteration, link.table, done)

        def write() -> None:
            began = time.monotonic_ns()
            try:
                part = stage_part(folder, self.attempt, link.index, rows)
            except Exception as error:  # each store has errors of its own; the chain may be far away, or at its end
                what = f"{iteration}: its rows could not be stored in {folder}: {type(error).__name__}: {error}"
                self.report({"kind": "unstored", "what": what})
                raise
            self.trace.add(Lane.STORAGE, "write", link.table, began, amount=part.nbytes)
            self.report({**event, "part": json.dumps(part_entry(part))})

        self.wait()
        self._writing = self._thread.submit(write)
        if self.durability is Durability.sync:
            self.wait()

    def note(self, table: str, iteration: Iteration, done: SoFar) -> None:
        """Report for a table of which this worker has no part."""
        if self.reports:
            self.report(_event(iteration, table, done))

    def wait(self) -> None:
        """Wait until everything is written. Raises what a write raised; Aborted when the run is stopped."""
        if self._writing is not None:
            finished(self._writing, self.stop)

    def close(self) -> None:
        """Take no more parts; one that is being written appears whole or not at all."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class PlainWriter:
    """Writes parts of a pass that nothing commits: their names say how many there are."""

    run_url: str
    reports: bool = False
    """Never: no driver waits for a part."""

    def save(self, link: Save | Keep, iteration: Iteration, rows: pa.Table, done: SoFar) -> None:
        """Write ``rows`` as part ``link.index`` of ``link.count``."""
        write_part(step_folder(self.run_url, link.table, iteration.step), link.index, link.count, rows)

    def note(self, table: str, iteration: Iteration, done: SoFar) -> None:
        """Report nothing: nobody commits the table."""

    def close(self) -> None:
        """Do nothing."""


def _event(iteration: Iteration, table: str, done: SoFar) -> dict[str, Any]:
    named = (str(iteration.phase), iteration.step, iteration.sequence)
    return {
        "kind": "staged",
        "iteration": named,
        "table": table,
        "metrics": pack(done.metrics),
        "position": done.position,
    }
