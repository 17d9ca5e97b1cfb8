"""Watches a run from inside the scheduler: when a worker leaves or a task fails, all workers are told at once."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from siirl_dask.errors import PeerError
from siirl_dask.worker.idle_workers import free_workers, other_runs
from siirl_dask.worker.node_watch import NodeWatch
from siirl_dask.worker.pulse import Reading
from siirl_dask.worker.run_meter import StepMerger
from siirl_dask.worker.tasks import is_task_of

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

logger = logging.getLogger("siirl_dask.worker")
ABORT = "siirl-abort"
"""Stream operation by which the supervisor stops a run's workers. Here, so that a scheduler need not import torch."""
_BYTES_ACKED = 120  # offset in struct tcp_info of tcpi_bytes_acked; tcpi_bytes_received follows (linux/tcp.h)
_EVERY_MS = 250.0  # interval of looks: a connection that closes loses what it carried since the last one
_LOOKS = 20  # within the patience for the driver, or the time between two words to it
_LEAVES = ("closing", "closing_gracefully")  # states of a worker that was retired or told to end
_NODES_EVERY = 1.0  # seconds between looks at what nodes get done
_NAMED = 16  # silent workers of which the driver is told
_CONNECTIONS = 100  # looked at in that time; more make the interval longer: 1,024 workers' took 5 % of the scheduler


class Supervisor(SchedulerPlugin):
    """Sends an abort to every worker of the run, and an event to the driver, when the run cannot go on.

    It also tells the driver now and then that something got done, and is told by the driver's pings that it is there.
    """

    def __init__(
        self,
        plugin: str,
        topic: str,
        members: Mapping[str, str],
        client: str | None,
        *,
        patience: float = 15.0,
        tell_every: float = 60.0,
        follows: str | None = None,
        elastic: bool = False,
        node_timeout: float = 0.0,
        run: str = "",
    ) -> None:
        """``client`` is the id of the driver's Dask client, or None where the cluster ends with the driver.

        Such a driver counts as gone after ``patience`` seconds without a ping. It is told of progress every
        ``tell_every`` seconds at most. The driver of an ``elastic`` run, which ``follows`` the run of that plugin, is
        told of workers that nobody uses, and shares none with another run. It is told of a node that gets nothing done
        on a worker for ``node_timeout`` seconds; 0: never. ``run`` is its name for Prometheus.
        """
        self._run = run
        self.name = plugin
        self.members = dict(members)
        self._names = {address: name for name, address in members.items()}
        self._client = client
        self._topic = topic
        self._follows, self._elastic = follows, elastic
        self._idle: set[str] = set()
        self._told: set[str] = set()
        self._left_in_order: set[str] = set()
        self._patience, self._tell_every = patience, tell_every
        self._heard, self._silent = False, 0
        self._looks, self._beats = 0, 0
        self._states: dict[str, WorkerState] = {}
        self._nodes, self._since_nodes = NodeWatch(node_timeout), 0.0

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        if self._elastic:
            self._claim()
        self._traffic = TrafficMeter(scheduler)
        self._merger = StepMerger.of(self._run, len(self.members)) if self._run else None
        calls = (self.abort, self.traffic, self.leave, self.ping, self.readings)
        self._handlers = {f"{self.name}-{call.__name__}": call for call in calls}
        scheduler.handlers.update(self._handlers)
        self._timer = PeriodicCallback(self._look, self._pause * 1000)
        self._timer.start()

    async def close(self) -> None:
        self._traffic.stop()
        self._timer.stop()
        for name in self._handlers:
            self._scheduler.handlers.pop(name, None)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        if worker not in self._left_in_order:
            self._lose(worker, in_order=False)

    def log_event(self, topic: str, msg: Any) -> None:
        """Take reports for Prometheus, and note that a worker leaves before it has: peers would be told of its tasks,
        which it ends by itself.
        """
        if topic == self._topic and self._merger is not None and isinstance(msg, dict):
            self._merger.take(msg)
        if topic not in self._names or topic in self._left_in_order or not isinstance(msg, dict):
            return
        if msg.get("action") == "worker-status-change" and msg.get("status") in _LEAVES:
            self._left_in_order.add(topic)
            self._lose(topic, in_order=True)

    def _lose(self, worker: str, *, in_order: bool) -> None:
        name = self._names.get(worker)
        if name is not None:
            state = None if in_order else self._states.get(worker)
            silence = None if state is None else max(0.0, time.time() - state.last_seen)
            event = {"kind": "lost", "member": name, "address": worker, "silence": silence, "in_order": in_order}
            event["memory"] = None if state is None else state.metrics.get("memory")
            self._scheduler.log_event(self._topic, event)
            self.abort(f"worker {name!r} at {worker} left the cluster")

    def _claim(self) -> None:
        """Raise PeerError if another run uses a worker of this one: both had found it idle."""
        taken = other_runs(self._scheduler, self.name, self._follows)
        if shared := [name for name, address in self.members.items() if address in taken]:
            raise PeerError(f"worker {shared[0]!r} was idle, and another run has taken it")

    def _tell_idle(self) -> None:
        """Tell the driver, once, of each set of idle workers that was there at two looks."""
        idle = {*free_workers(self.name, dask_scheduler=self._scheduler).values()} - self._names.keys()
        if idle == self._idle and idle - self._told:
            self._told = idle
            self._scheduler.log_event(self._topic, {"kind": "idle"})
        self._idle = idle

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Stop the run when its driver is gone or cut off, and take it off the cluster, so that another may start."""
        if client == self._client:
            self._end_without_driver("the driver left the cluster")

    async def leave(self) -> None:
        """Take the run off the cluster, with all that it has built on the workers. The driver calls this, too."""
        await self.close()
        self._scheduler.remove_plugin(self.name)
        try:
            await self._scheduler.unregister_worker_plugin(comm=None, name=self.name)
        except (OSError, ValueError) as error:  # a worker is gone, or the run never came as far as the workers
            logger.info("run %s was not taken off every worker: %s", self.name, error)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "erred" and is_task_of(self.name, key):
            self.abort(f"task {key} failed")

    def abort(self, reason: str) -> None:
        """Tell every worker that is still there to stop. The driver calls this as a handler, too."""
        message = {"op": ABORT, "plugin": self.name, "reason": reason}
        present = [address for address in self.members.values() if address in self._scheduler.stream_comms]
        self._scheduler.send_all({}, {address: [message] for address in present})

    def ping(self) -> bool:
        """Take the driver's sign of life, and answer it: Dask answers None for a handler that is not there."""
        self._heard = True
        return True

    def readings(self) -> dict[str, tuple[int, str, bool]]:
        """Return each worker's last reading of its pulse: beats, place, and whether it waits for others."""
        known = self._scheduler.workers
        readings = {
            member: Reading.of(known[address].metrics if address in known else {}, self.name)
            for member, address in self.members.items()
        }
        return {member: (reading.beats, reading.place, reading.waits) for member, reading in readings.items()}

    def _busiest_place(self) -> str:
        """Return where most workers are that do not wait for others; an empty text where all wait."""
        places = Counter(place for _, place, waits in self.readings().values() if place and not waits)
        return next((place for place, _ in places.most_common(1)), "")

    @property
    def _pause(self) -> float:
        return min(self._patience, self._tell_every) / _LOOKS

    def _look(self) -> None:
        """Tell the driver of progress, and end the run when it has given no sign of life for too long.

        Looks are counted, not seconds: a scheduler that stood still itself has heard nobody meanwhile.
        """
        known = self._scheduler.workers
        self._states |= {address: known[address] for address in self.members.values() if address in known}
        if self._elastic:
            self._tell_idle()
        self._look_at_nodes()
        self._looks += 1
        if self._looks * self._pause >= self._tell_every / 2:
            self._looks, before = 0, self._beats
            self._beats = sum(beats for beats, _, _ in self.readings().values())
            if self._beats != before:
                event = {"kind": "progress", "beats": self._beats, "place": self._busiest_place()}
                self._scheduler.log_event(self._topic, event)
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._client is not None and self._silent * self._pause >= self._patience:
            self._end_without_driver(f"the driver gave no sign of life for {self._patience:g} s")

    def _look_at_nodes(self) -> None:
        """Tell the driver, every so often, of workers that have been silent in a node, or say nothing at all."""
        self._since_nodes += self._pause
        if not self._nodes.timeout or self._since_nodes < min(_NODES_EVERY, self._nodes.timeout / 4):
            return
        seconds, self._since_nodes = self._since_nodes, 0.0
        known = self._scheduler.workers
        readings = {
            member: (Reading.of(known[address].metrics, self.name), known[address].last_seen)
            for member, address in self.members.items()
            if address in known
        }
        if silent := self._nodes.look(seconds, readings):
            named = [[one.member, one.place, one.seconds, one.heard] for one in silent[:_NAMED]]
            self._scheduler.log_event(self._topic, {"kind": "hung", "silent": named})

    def _end_without_driver(self, reason: str) -> None:
        self._client = None
        logger.warning("run %s is stopped and taken off the cluster: %s", self.name, reason)
        self.abort(reason)
        self._leaving = asyncio.create_task(self.leave())

    def traffic(self) -> int | None:
        """Return the bytes over the scheduler's connections since the start, both ways; None if not countable."""
        return self._traffic.total()


class TrafficMeter:
    """Counts the bytes over every connection of a scheduler; the client has no others, except to workers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._total = 0
        self._supported = hasattr(socket, "TCP_INFO")
        self._timer = PeriodicCallback(self._look, _EVERY_MS)
        self._look(count=False)
        self._timer.start()

    def stop(self) -> None:
        """Count no more."""
        self._timer.stop()

    def total(self) -> int | None:
        """Return the bytes so far; None where they cannot be counted."""
        self._look()
        return self._total if self._supported else None

    def _look(self, count: bool = True) -> None:
        if not self._supported:
            return
        comms = list(self._comms())
        self._timer.callback_time = _EVERY_MS * max(1.0, len(comms) / _CONNECTIONS)
        for comm in comms:
            total = carried(comm)
            if total is not None:
                self._total += (total - self._seen.get(comm, 0)) if count else 0
                self._seen[comm] = total

    def _comms(self) -> Iterable[Any]:
        yield from self._scheduler._comms  # opened by others to the scheduler
        for comms in (*self._scheduler.rpc.available.values(), *self._scheduler.rpc.occupied.values()):
            yield from comms


def carried(comm: Any) -> int | None:
    """Return the bytes over a connection so far, both ways; None where they cannot be counted."""
    stream = getattr(comm, "stream", None)
    if stream is None or stream.closed():
        return None
    info = stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 16)
    if len(info) < _BYTES_ACKED + 16:
        return None
    acked, received = struct.unpack_from("QQ", info, _BYTES_ACKED)
    return int(acked + received)
