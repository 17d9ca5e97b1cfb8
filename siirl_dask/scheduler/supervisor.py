"""Watches a run from inside the scheduler: when a worker leaves or a task fails, all workers are
stopped at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from siirl_dask.dask_internals import (
    add_handlers,
    connection_bytes,
    connections_of,
    remove_handlers,
    remove_worker_plugin,
    send_to_workers,
)
from siirl_dask.errors import PeerError
from siirl_dask.scheduler.idle_workers import free_workers, other_runs
from siirl_dask.scheduler.node_watch import NodeWatch
from siirl_dask.scheduler.run_meter import StepMerger
from siirl_dask.worker.monitoring.task_progress import Reading
from siirl_dask.worker.stop import ABORT
from siirl_dask.worker.tasks import is_task_of

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

logger = logging.getLogger("siirl_dask.scheduler")
# between two counts: a connection that closes loses what it carried since the last one
_TRAFFIC_EVERY_MS = 250.0
# counted in that time; more make the interval longer: 1,024 workers' took 5 % of the scheduler
_CONNECTIONS = 100
_TICKS = 20  # within the patience for the driver, or the time between two reports of progress to it
_LEAVING = ("closing", "closing_gracefully")  # states of a worker that was retired or told to end
_NODES_EVERY = 1.0  # seconds between checks of the progress of nodes
_MAX_SILENT = 16  # silent workers that are reported to the driver


class Supervisor(SchedulerPlugin):
    """Sends an abort to every worker of the run, and an event to the driver, when the run cannot go
    on.

    It also reports progress to the driver now and then, and takes the driver's pings as its signs
    of life.
    """

    def __init__(
        self,
        plugin: str,
        topic: str,
        members: Mapping[str, str],
        client: str | None,
        *,
        patience: float = 15.0,
        report_every: float = 60.0,
        follows: str | None = None,
        elastic: bool = False,
        node_timeout: float = 0.0,
        run: str = "",
    ) -> None:
        """``client`` is the id of the driver's Dask client, or None where the cluster ends with the
        driver.

        Such a driver counts as gone after ``patience`` seconds without a ping. Progress is reported
        to it every ``report_every`` seconds at most. The run takes the
        place of the one that it ``follows``, by the name of that one's plugins. The driver of an
        ``elastic`` run is informed of workers that nobody uses. A node that makes no progress on a
        worker for ``node_timeout`` seconds is reported; 0: never. ``run`` is its name for
        Prometheus.

        No worker is of two runs: the groups of torch.distributed are those of its process, and the
        second run would end those of the first. ``start`` raises PeerError for one that is taken.
        """
        self.name = plugin
        self.members = dict(members)
        self._run = run
        self._topic = topic
        self._client = client
        self._patience = patience
        self._report_every = report_every
        self._follows = follows
        self._elastic = elastic
        self._names = {address: name for name, address in members.items()}
        self._states: dict[str, WorkerState] = {}
        """Dask's states of the workers, by address, also of those that have left."""
        self._left_in_order: set[str] = set()
        self._idle: set[str] = set()
        """Addresses of the workers that were idle at the last tick."""
        self._reported_idle: set[str] = set()
        self._pinged = False
        self._ticks_without_ping = 0
        self._ticks_since_report = 0
        self._reported_beats = 0
        self._nodes = NodeWatch(node_timeout)
        self._since_nodes = 0.0
        """Seconds since the nodes' progress was checked."""

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._check_not_taken()
        self._traffic = TrafficMeter(scheduler)
        self._merger = StepMerger.of(self._run, len(self.members)) if self._run else None
        calls = (self.abort, self.traffic, self.leave, self.ping, self.readings)
        self._handlers = {f"{self.name}-{call.__name__}": call for call in calls}
        add_handlers(scheduler, self._handlers)
        self._timer = PeriodicCallback(self._tick, self._tick_seconds * 1000)
        self._timer.start()

    async def close(self) -> None:
        self._traffic.stop()
        self._timer.stop()
        remove_handlers(self._scheduler, self._handlers)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        if worker not in self._left_in_order:
            self._lose(worker, in_order=False)

    def log_event(self, topic: str, msg: Any) -> None:
        """Count reports of steps for Prometheus, and report a worker as lost when it begins to
        leave: its tasks fail then, which must not look like the cause.
        """
        if not isinstance(msg, dict):
            return
        if topic == self._topic and self._merger is not None:
            self._merger.take(msg)
        if topic not in self._names or topic in self._left_in_order:
            return
        if msg.get("action") == "worker-status-change" and msg.get("status") in _LEAVING:
            self._left_in_order.add(topic)
            self._lose(topic, in_order=True)

    def _lose(self, address: str, *, in_order: bool) -> None:
        """Report a worker of the run as lost, and stop all others."""
        name = self._names.get(address)
        if name is None:
            return
        state = None
        if not in_order:
            state = self._states.get(address)
        silence = None
        memory = None
        if state is not None:
            silence = max(0.0, time.time() - state.last_seen)
            memory = state.metrics.get("memory")
        event = {
            "kind": "lost",
            "member": name,
            "address": address,
            "silence": silence,
            "in_order": in_order,
            "memory": memory,
        }
        self._scheduler.log_event(self._topic, event)
        self.abort(f"worker {name!r} at {address} left the cluster")

    def _check_not_taken(self) -> None:
        """Raise PeerError if another run uses a worker of this one: both had found it free."""
        taken = other_runs(self._scheduler, self.name, self._follows)
        shared = [name for name, address in self.members.items() if address in taken]
        if shared:
            raise PeerError(f"worker {shared[0]!r} was idle, and another run has taken it")

    def _report_idle(self) -> None:
        """Report once to the driver that workers are idle, for each set of them that is the same
        at two ticks.
        """
        idle = (
            set(free_workers(self.name, dask_scheduler=self._scheduler).values())
            - self._names.keys()
        )
        if idle == self._idle and idle - self._reported_idle:
            self._reported_idle = idle
            self._scheduler.log_event(self._topic, {"kind": "idle"})
        self._idle = idle

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Stop the run when its driver is gone or cut off, and remove it from the cluster:
        another may start then.
        """
        if client == self._client:
            self._end_without_driver("the driver left the cluster")

    async def leave(self) -> None:
        """Remove the run from the cluster, with all that it has built on the workers. The driver
        calls this, too.
        """
        await self.close()
        self._scheduler.remove_plugin(self.name)
        try:
            await remove_worker_plugin(self._scheduler, self.name)
        except (
            OSError,
            ValueError,
        ) as error:  # a worker is gone, or the run never reached the workers
            logger.info("run %s was not taken off every worker: %s", self.name, error)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "erred" and is_task_of(self.name, key):
            self.abort(f"task {key} failed")

    def abort(self, reason: str) -> None:
        """Stop every worker that is still connected. The driver calls this as a handler, too."""
        message = {"op": ABORT, "plugin": self.name, "reason": reason}
        send_to_workers(self._scheduler, self.members.values(), message)

    def ping(self) -> bool:
        """Record the driver's sign of life, and return True: Dask answers None for a handler
        that is not there.
        """
        self._pinged = True
        return True

    def readings(self) -> dict[str, tuple[int, str, bool]]:
        """Return each worker's last reading: beats, place, and whether it waits for others."""
        return {
            member: (reading.beats, reading.place, reading.waits)
            for member, reading in self._readings().items()
        }

    def _readings(self) -> dict[str, Reading]:
        workers = self._scheduler.workers
        readings: dict[str, Reading] = {}
        for member, address in self.members.items():
            metrics = {}
            if address in workers:
                metrics = workers[address].metrics
            readings[member] = Reading.of(metrics, self.name)
        return readings

    @property
    def _tick_seconds(self) -> float:
        return min(self._patience, self._report_every) / _TICKS

    def _tick(self) -> None:
        """Report progress to the driver, and end the run when it has given no sign of life for too
        long.

        Ticks are counted, not seconds: a scheduler that stood still itself has heard nobody
        meanwhile.
        """
        workers = self._scheduler.workers
        self._states |= {
            address: workers[address] for address in self.members.values() if address in workers
        }
        if self._elastic:
            self._report_idle()
        self._check_nodes()
        self._ticks_since_report += 1
        if self._ticks_since_report * self._tick_seconds >= self._report_every / 2:
            self._ticks_since_report = 0
            self._report_progress()
        self._ticks_without_ping = 0 if self._pinged else self._ticks_without_ping + 1
        self._pinged = False
        if (
            self._client is not None
            and self._ticks_without_ping * self._tick_seconds >= self._patience
        ):
            self._end_without_driver(f"the driver gave no sign of life for {self._patience:g} s")

    def _report_progress(self) -> None:
        """Report the sums of beats and of samples to the driver if the former has changed, and
        where most workers are that do not wait.
        """
        readings = self._readings().values()
        beats = sum(reading.beats for reading in readings)
        if beats == self._reported_beats:
            return
        self._reported_beats = beats
        busy = Counter(reading.place for reading in readings if reading.place and not reading.waits)
        event = {
            "kind": "progress",
            "beats": beats,
            "place": busy.most_common(1)[0][0] if busy else "",
            "sampled": sum(reading.sampled for reading in readings),
            "to_sample": sum(reading.to_sample for reading in readings),
        }
        self._scheduler.log_event(self._topic, event)

    def _check_nodes(self) -> None:
        """Report workers to the driver that make no progress in a node, or whose process is
        silent.
        """
        self._since_nodes += self._tick_seconds
        if not self._nodes.timeout or self._since_nodes < min(
            _NODES_EVERY, self._nodes.timeout / 4
        ):
            return
        seconds = self._since_nodes
        self._since_nodes = 0.0
        workers = self._scheduler.workers
        readings = {
            member: (Reading.of(workers[address].metrics, self.name), workers[address].last_seen)
            for member, address in self.members.items()
            if address in workers
        }
        silent = self._nodes.silent_workers(seconds, readings)
        if silent:
            silences = [
                [worker.member, worker.place, worker.seconds, worker.heard]
                for worker in silent[:_MAX_SILENT]
            ]
            self._scheduler.log_event(self._topic, {"kind": "hung", "silent": silences})

    def _end_without_driver(self, reason: str) -> None:
        self._client = None
        logger.warning("run %s is stopped and taken off the cluster: %s", self.name, reason)
        self.abort(reason)
        self._leaving = asyncio.create_task(self.leave())

    def traffic(self) -> int | None:
        """Return the bytes over the scheduler's connections since the start, both ways; None if
        not countable.
        """
        return self._traffic.total()


class TrafficMeter:
    """Counts the bytes over every connection of a scheduler; the client has no others, except to
    workers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._total = 0
        self._supported = hasattr(socket, "TCP_INFO")
        self._timer = PeriodicCallback(self._update, _TRAFFIC_EVERY_MS)
        for comm in connections_of(scheduler):  # bytes from before the start do not count
            carried = None
            if self._supported:
                carried = connection_bytes(comm)
            if carried is not None:
                self._seen[comm] = carried
        self._timer.start()

    def stop(self) -> None:
        """Stop counting."""
        self._timer.stop()

    def total(self) -> int | None:
        """Return the bytes so far; None where they cannot be counted."""
        self._update()
        if self._supported:
            return self._total
        return None

    def _update(self) -> None:
        """Add the bytes that each connection has carried since the last update."""
        if not self._supported:
            return
        comms = list(connections_of(self._scheduler))
        self._timer.callback_time = _TRAFFIC_EVERY_MS * max(1.0, len(comms) / _CONNECTIONS)
        for comm in comms:
            carried = connection_bytes(comm)
            if carried is not None:
                self._total += carried - self._seen.get(comm, 0)
                self._seen[comm] = carried
