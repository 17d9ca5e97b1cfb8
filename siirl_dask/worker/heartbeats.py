"""Adds to a Dask worker's heartbeats: how its run's task goes on, where it is, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from siirl_dask.context import Device
from siirl_dask.worker.load import SUFFIX, Load
from siirl_dask.worker.pulse import Pulse
from siirl_dask.worker.tracing import Tracing

if TYPE_CHECKING:
    from distributed import Worker

    from siirl_dask.coordinator.databuffer.databuffer import Databuffer

_PLACE = "siirl_place"  # in Dask's metrics of a worker


class Heartbeats:
    """Entries of one run in the metrics that a Dask worker sends with each heartbeat, until ``end``."""

    def __init__(
        self,
        worker: Worker,
        plugin: str,
        pulse: Pulse,
        tracing: Tracing,
        databuffer: Databuffer,
        device: Callable[[], Device | None],
    ) -> None:
        """``plugin`` names the run's entries; ``device`` returns the worker's device once it is known."""
        self._metrics = worker.metrics
        self._plugin = plugin
        self._pulse, self._tracing = pulse, tracing
        self._databuffer, self._device = databuffer, device
        self._metrics |= {plugin: self._heartbeat, plugin + SUFFIX: self._load, _PLACE: self._place}

    def end(self) -> None:
        """Take the entries away, except those that another run in this process has replaced."""
        for name in (self._plugin, self._plugin + SUFFIX):
            self._metrics.pop(name, None)
        if self._metrics.get(_PLACE) == self._place:
            del self._metrics[_PLACE]

    def _place(self, worker: Worker) -> str:
        """Return where the task is, for the table of workers on Dask's dashboard."""
        return self._pulse.place[:60]

    def _heartbeat(self, worker: Worker) -> list[Any]:
        """Return the pulse. The heartbeat before has compared this host's clock with the scheduler's."""
        self._tracing.compare(worker.scheduler_delay)
        return self._pulse.read()

    def _load(self, worker: Worker) -> dict[str, Any]:
        return asdict(Load.now(self._pulse, self._databuffer, self._device()))
