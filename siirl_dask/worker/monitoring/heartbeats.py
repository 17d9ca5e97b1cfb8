"""Adds entries to a Dask worker's heartbeats: the progress of its run's task, where the task is,
and its work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from siirl_dask.context import Device
from siirl_dask.dask_internals import clock_offset, heartbeat_metrics
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.monitoring.tracing import Tracing
from siirl_dask.worker.monitoring.work import SUFFIX, Work

if TYPE_CHECKING:
    from distributed import Worker

    from siirl_dask.coordinator.databuffer.databuffer import Databuffer

_PLACE = "siirl_place"  # in Dask's metrics of a worker


class Heartbeats:
    """Entries of one run in the metrics that a Dask worker sends with each heartbeat, until
    ``end``.
    """

    def __init__(
        self,
        worker: Worker,
        plugin: str,
        progress: TaskProgress,
        tracing: Tracing,
        databuffer: Databuffer,
        device: Callable[[], Device | None],
    ) -> None:
        """``plugin`` names the run's entries; ``device`` returns the worker's device once it is
        known.
        """
        self._metrics = heartbeat_metrics(worker)
        self._plugin = plugin
        self._progress = progress
        self._tracing = tracing
        self._databuffer = databuffer
        self._device = device
        self._metrics |= {plugin: self._reading, plugin + SUFFIX: self._work, _PLACE: self._place}

    def end(self) -> None:
        """Remove the entries, except those that another run in this process has replaced."""
        for name in (self._plugin, self._plugin + SUFFIX):
            self._metrics.pop(name, None)
        if self._metrics.get(_PLACE) == self._place:
            del self._metrics[_PLACE]

    def _place(self, worker: Worker) -> str:
        """Return where the task is, for the table of workers on Dask's dashboard."""
        return self._progress.place[:60]

    def _reading(self, worker: Worker) -> list[Any]:
        """Return the progress. The heartbeat before has compared this host's clock with the
        scheduler's.
        """
        self._tracing.add_clock_sample(clock_offset(worker))
        return self._progress.read()

    def _work(self, worker: Worker) -> dict[str, Any]:
        return asdict(Work.now(self._progress, self._databuffer, self._device()))
