"""The runs of a scheduler, for a page on its dashboard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from siirl_dask.dask_internals import heartbeat_seconds, plugins_of
from siirl_dask.views.dashboard.source import Pulses
from siirl_dask.views.dashboard.store import LiveRun, RunStore
from siirl_dask.views.dashboard.workers_panel import WorkerState
from siirl_dask.worker.monitoring.task_progress import Reading
from siirl_dask.worker.monitoring.work import Work

if TYPE_CHECKING:
    from distributed import Scheduler


class SchedulerSource:
    """Knows of runs what drivers and workers tell the scheduler."""

    is_served = False

    def __init__(self, scheduler: Scheduler, store: RunStore) -> None:
        self.store = store
        self._scheduler = scheduler

    def refresh(self) -> None:
        """Do nothing: what a run reports is in the store at once."""

    def goes_on(self, run: LiveRun) -> bool:
        """Return whether the run is under way: its supervisor leaves with it, however it ends."""
        if run.ended is not None:
            return False
        return run.plugin in plugins_of(self._scheduler)

    def pulse_seconds(self) -> float:
        """Return the seconds between two heartbeats of a worker."""
        return heartbeat_seconds(len(self._scheduler.workers))

    def pulses(self, run: LiveRun) -> Pulses:
        """Return what the workers reported with their last heartbeats."""
        readings = {}
        states = []
        for member, address in run.members.items():
            state = self._scheduler.workers.get(address)
            if state is None:
                continue
            reading = Reading.of(state.metrics, run.plugin)
            readings[member] = (reading.beats, reading.place, reading.waits)
            states.append(_state_of(run, member, state, reading))
        return Pulses(readings, states)


def _state_of(run: LiveRun, member: str, state: Any, reading: Reading) -> WorkerState:
    metrics = state.metrics
    spilled = metrics.get("spilled_bytes")
    if not spilled:
        spilled = {}
    return WorkerState(
        worker=member,
        host=str(state.host),
        place=reading.place + (", waits for others" if reading.waits else ""),
        rate=run.live.rate(member),
        tokens=run.tokens.get(member, 0.0),
        memory=int(metrics.get("memory") or 0),
        spilled=int(spilled.get("disk") or 0) if isinstance(spilled, Mapping) else 0,
        load=Work.of(metrics, run.plugin),
        silent=max(0.0, time.time() - state.last_seen),
    )
