"""What watches a run from inside the scheduler: when a member leaves or a task fails, everyone is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

from siirl_dask.worker.dag_worker import ABORT
from siirl_dask.worker.traffic import TrafficMeter

if TYPE_CHECKING:
    from distributed import Scheduler


class Supervisor(SchedulerPlugin):
    """Streams an abort to every member, and an event to the driver, when the run cannot go on."""

    def __init__(self, plugin: str, topic: str, members: Mapping[str, str]) -> None:
        self.name = plugin
        self._topic = topic
        self._members = dict(members)

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._traffic = TrafficMeter(scheduler)
        scheduler.handlers[f"{self.name}-abort"] = self.abort
        scheduler.handlers[f"{self.name}-traffic"] = self.traffic

    async def close(self) -> None:
        for name in ("abort", "traffic"):
            self._scheduler.handlers.pop(f"{self.name}-{name}", None)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        lost = [name for name, address in self._members.items() if address == worker]
        if lost:
            scheduler.log_event(self._topic, {"kind": "lost", "member": lost[0], "address": worker})
            self.abort(f"worker {lost[0]!r} at {worker} left the cluster")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "erred" and str(key).startswith(f"{self.name}-"):
            self.abort(f"task {key} failed")

    def abort(self, reason: str) -> None:
        """Tell every member that is still there to stop. Also a handler that the driver calls."""
        message = {"op": ABORT, "plugin": self.name, "reason": reason}
        present = [address for address in self._members.values() if address in self._scheduler.stream_comms]
        self._scheduler.send_all({}, {address: [message] for address in present})

    def traffic(self) -> int | None:
        """Bytes over the scheduler's connections since the start, both ways; None where they cannot be counted."""
        return self._traffic.total()
