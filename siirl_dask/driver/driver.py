"""Submits iterations to the workers a few steps ahead, and receives metrics and failures, never
a sample.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import Any

from distributed import Client, Future

from siirl_dask.config import ClusterConfig
from siirl_dask.driver.clusters.calls import SLICE, submit
from siirl_dask.driver.clusters.run_on_cluster import RunOnCluster
from siirl_dask.driver.failures import FAILURES, failure_of
from siirl_dask.driver.iterations import (
    CompletedIteration,
    PendingIteration,
    StagedTable,
    WrittenCheckpoint,
)
from siirl_dask.driver.recovery.pending_checkpoints import PendingCheckpoints
from siirl_dask.driver.recovery.staged_tables import StagedTables
from siirl_dask.driver.who_waits import (
    describe_positions,
    describe_waits,
    failure_of_hang,
    warn_of_busy_workers,
)
from siirl_dask.errors import RunError, SchedulerLost, SiirlError
from siirl_dask.observe import merge, unpack
from siirl_dask.planner import Iteration, Phase
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.tasks import finish_worker, run_chain, save_worker, start_worker

_REPORTS_PER_TIMEOUT = 4  # reports of progress within the shortest time that may pass without any
_REPORT_INTERVAL = 4.0  # seconds between two reports of progress, at most
_CLOSE_TIMEOUT = 30.0  # seconds for every worker to free its model
_STOP_TIMEOUT = 2.0  # seconds for workers to notice an abort before the cluster is closed
_STOP_INTERVAL = 0.05  # seconds between two checks of whether they have


OnProgress = Callable[[int, str, int, int], None]
"""Called with the number of units of work (samples, micro-batches, rows, ...) that workers have
completed so far, where most of them are, and how many samples of how many they have completed
there, 0 of 0 where none are drawn."""


class Driver:
    """Runs iterations on the workers of a run."""

    def __init__(
        self,
        client: Client,
        spec: RunSpec,
        lookahead: int,
        stall_timeout: float,
        folder: Callable[[int], str],
        on_progress: OnProgress = lambda beats, place, sampled, to_sample: None,
        on_idle: Callable[[], None] | None = None,
        node_timeout: float = 0.0,
        check: Callable[[], None] = lambda: None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """``folder(step)`` returns the URL of a new folder for the checkpoint of a step.

        ``on_progress`` is called every few seconds in which something got done. ``on_idle`` is
        called when there are new workers that no run uses; None if the run could not take them. A
        node that gets nothing done on a worker for ``node_timeout`` seconds fails the run; 0: it
        may take any time. ``check`` is called between events, and may raise to end the run. Each
        task claims ``resources`` of its worker.
        """
        self._client = client
        self._spec = spec
        self._lookahead = lookahead
        self._stall_timeout = stall_timeout
        self._node_timeout = node_timeout
        self._check = check
        self._resources = resources
        self._folder = folder
        self._on_progress = on_progress
        self._on_idle = on_idle
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._pending: deque[PendingIteration] = deque()
        self._checkpoints = PendingCheckpoints(spec.members)
        self._tables = StagedTables(spec.members)
        self._last_futures: dict[str, Future[Any]] = {}
        self._turn = 0
        self._on_cluster = RunOnCluster(client, spec, self._events.put)
        self._finishing = False
        self.reused_roles: dict[str, list[str]] = {}
        """Roles that each worker has taken over from an earlier run, instead of building them."""
        self.accelerators: set[str] = set()
        """Names of the workers' accelerators that are faster in bfloat16 than in float32."""

    @property
    def plugin(self) -> str:
        """Name of the run's plugins on scheduler and workers."""
        return self._spec.plugin

    @contextmanager
    def session(
        self,
        cluster: ClusterConfig,
        on_failure: Callable[[SiirlError], bool | None],
        previous: Driver | None = None,
    ) -> Iterator[None]:
        """Build every worker's roles, and free them on the way out; an exception inside stops the
        workers.

        ``on_failure`` is called with a failure at once: to stop workers that do not answer takes
        seconds. When it returns True, the run is launched again, and the workers keep what they
        have built until ``close``. This launch takes over the roles that the ``previous`` one has
        left there, and closes that one.
        """
        is_relaunched = False
        try:
            try:
                self.start(cluster.start_timeout, cluster_stays=cluster.exists)
            finally:
                if previous is not None:
                    previous.close()
            yield
            self.finish(_CLOSE_TIMEOUT)
        except BaseException as error:
            if isinstance(error, SchedulerLost):
                error.may_return = cluster.scheduler_may_return
            if isinstance(error, SiirlError):
                is_relaunched = bool(on_failure(error))
            self.abort(f"the run was stopped: {type(error).__name__}")
            raise
        finally:
            if not is_relaunched:
                self._on_cluster.stop_watching()
                if cluster.exists and self._on_cluster.is_reachable:
                    warn_of_busy_workers(self._client, self._spec, self._busy_workers())
                    self.close()  # a cluster that was started for this run ends with it

    def start(self, timeout: float, *, cluster_stays: bool = False) -> None:
        """Register the run on the cluster and build every worker's roles. Raises what a role's
        build raised.

        ``cluster_stays``: the cluster stays when this process ends, however that happens.
        """
        shortest_timeout = min(timeout, self._stall_timeout)
        interval = min(shortest_timeout / _REPORTS_PER_TIMEOUT, _REPORT_INTERVAL)
        ports = self._on_cluster.register(
            cluster_stays,
            interval,
            self._handle_next,
            elastic=self._on_idle is not None,
            node_timeout=self._node_timeout,
        )
        self._last_futures = self._submit("start", start_worker, ports=ports)
        self._await_all(timeout, "the start", "cluster.start_timeout")

    def run(
        self, iterations: Iterator[Iteration]
    ) -> Iterator[CompletedIteration | StagedTable | WrittenCheckpoint]:
        """Yield each iteration that all workers have completed, each table and each checkpoint once
        it is written.

        The next iterations are running by then. A table may be yielded while its iteration goes on,
        or some iterations later; a checkpoint after all tables of the steps up to it. Raises the
        run's failure: WorkerLost names the worker and the step, CheckpointError a folder that
        cannot be written; any other exception comes from a node.
        """
        since = time.monotonic()
        while True:
            self._submit_ahead(iterations)
            while (table := self._tables.pop()) is not None:
                yield table
            while (checkpoint := self._checkpoints.pop(self._first_unfinished())) is not None:
                yield checkpoint
            if not self._pending and not self._checkpoints and self._tables.first_awaited is None:
                return
            if not self._pending or len(self._pending[0].logged) < len(self._spec.members):
                event = self._next_event(
                    self._stall_timeout, self._position(), "cluster.stall_timeout"
                )
                self._handle(event)
                continue
            first = self._pending.popleft()
            self._tables.end(first.iteration.sequence)
            now = time.monotonic()
            metrics = merge([first.logged[worker] for worker in self._spec.members])
            yield CompletedIteration(first.iteration, now - since, metrics)
            since = now

    def traffic(self) -> int | None:
        """Return the bytes through the scheduler and the client since ``start``; None where they
        cannot be counted.
        """
        return self._on_cluster.traffic()

    def abort(self, reason: str) -> None:
        """Order every worker to stop, and wait up to two seconds until they have."""
        if not self._on_cluster.is_reachable:
            return
        self._on_cluster.abort(reason)
        deadline = time.monotonic() + _STOP_TIMEOUT
        present = self._on_cluster.present()
        while self._pending and time.monotonic() < deadline:
            if present.isdisjoint(self._busy_workers()):
                return
            time.sleep(_STOP_INTERVAL)

    def finish(self, timeout: float) -> None:
        """Free what every worker has built."""
        self._finishing = True
        self._last_futures = self._submit("finish", finish_worker)
        self._await_all(timeout, "the end", "the time for workers to free what they built")

    def close(self) -> None:
        """Take the run off the cluster."""
        self._pending.clear()
        self._last_futures = {}
        self._on_cluster.leave()

    def abandon(self) -> None:
        """Forget the run without a message to anybody: the cluster is gone, or is being closed."""
        self._on_cluster.abandon()
        self.close()

    def _submit_ahead(self, iterations: Iterator[Iteration]) -> None:
        """Submit iterations to all workers until one more than ``lookahead`` are pending, or all
        are.
        """
        while len(self._pending) <= self._lookahead:
            iteration = next(iterations, None)
            if iteration is None:
                return
            first = self._pending[0].iteration if self._pending else iteration
            name = str(iteration.phase)
            arguments = {"iteration": astuple(iteration), "completed": first.sequence}
            if iteration.phase is Phase.CHECKPOINT:
                url = self._folder(iteration.step)
                self._checkpoints.begin(iteration, url)
                self._last_futures = self._submit(name, save_worker, **arguments, url=url)
            else:
                self._last_futures = self._submit(name, run_chain, **arguments)
            self._pending.append(PendingIteration(iteration, self._last_futures))

    def _submit(
        self, what: str, function: Callable[..., None], **arguments: Any
    ) -> dict[str, Future[Any]]:
        """Submit the next task of each worker."""
        futures = submit(
            self._client,
            plugin=self._spec.plugin,
            what=what,
            run=self._spec.name,
            members=self._spec.members,
            function=function,
            turn=self._turn,
            resources=self._resources,
            **arguments,
        )
        self._turn += 1
        for worker, future in futures.items():
            future.add_done_callback(self._listener(worker))
        return futures

    def _listener(self, worker: str) -> Callable[[Future[Any]], None]:
        def on_done(future: Future[Any]) -> None:
            if future.status == "error":
                self._events.put({"kind": "error", "member": worker, "error": future.exception()})
            elif future.status == "finished":
                self._events.put({"kind": "finished", "member": worker, "key": future.key})

        return on_done

    def _first_unfinished(self) -> int | None:
        """Return the sequence number of the first iteration that is not done, or that has tables
        to come; None if all are whole.
        """
        unfinished = [pending.iteration.sequence for pending in self._pending]
        if self._tables.first_awaited is not None:
            unfinished.append(self._tables.first_awaited)
        return min(unfinished, default=None)

    def _await_all(self, timeout: float, position: str, limit: str) -> None:
        """Return once the last task of every worker is finished; see ``_next_event`` for the
        errors.
        """
        waiting = {future.key for future in self._last_futures.values()}
        while waiting:
            event = self._next_event(timeout, position, limit)
            waiting.discard(event.get("key"))
            self._handle(event)

    def _next_event(self, timeout: float, position: str, limit: str) -> dict[str, Any]:
        """Return the next event; the supervisor sends one as long as anything gets done on a
        worker.

        Waits in slices, so that Ctrl-C is noticed. RunError after ``timeout`` seconds of silence;
        ``limit`` is the configuration key of the timeout, for the message.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            self._check()
            try:
                return self._events.get(timeout=min(left, SLICE))
            except queue.Empty:
                continue
        raise self._stall(f"{position}: nothing got done within {timeout:g} s ({limit})")

    def _handle_next(self) -> None:
        self._check()
        with suppress(queue.Empty):
            self._handle(self._events.get_nowait())

    def _handle(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "done":
                sequence = event["sequence"]
                pending = {each.iteration.sequence: each for each in self._pending}
                pending[sequence].logged[event["member"]] = unpack(event["metrics"])
                self._tables.await_tables(sequence, event.get("tables", ()))
                if "saved" in event:
                    self._checkpoints.add_saved(event)
            case "staged":
                self._tables.report(event)
            case "written":
                self._checkpoints.add_written(event)
            case kind if kind in FAILURES:
                raise failure_of(event, self._events, self._position())
            case "hung":
                raise failure_of_hang(self._client, self._spec, event["silent"], self._position())
            case "no scheduler":
                self._on_cluster.abandon()
                raise SchedulerLost(
                    f"{self._position()}: {event['what']}; what was written is whole"
                )
            case "built":
                self.reused_roles[event["member"]] = list(event["kept"])
                if event["accelerator"]:
                    self.accelerators.add(event["accelerator"])
            case "progress":
                self._on_progress(
                    event["beats"], event["place"], event["sampled"], event["to_sample"]
                )
            case "idle" if self._on_idle is not None:
                self._on_idle()
            case "finished":
                pass

    def _stall(self, message: str) -> RunError:
        """Return the failure of a run in which all workers are silent, with where they are and
        who waits for whom.
        """
        try:
            readings = self._on_cluster.readings()
        except OSError:
            return RunError(f"{message}: and the scheduler does not say where the workers are")
        busy = {worker: readings[worker] for worker in self._busy_workers()}
        positions = describe_positions(busy, list(self._checkpoints.unwritten()))
        stall = RunError(f"{message}: {positions}")
        hanging = []
        for worker, reading in readings.items():
            if reading.place and not reading.waits:
                hanging.append(worker)
        stall.report = describe_waits(self._client, self._spec, hanging)
        return stall

    def _busy_workers(self) -> list[str]:
        """Return the workers that are still in the first pending iteration, or still building
        their roles.
        """
        futures = self._pending[0].futures if self._pending else self._last_futures
        return [worker for worker, future in futures.items() if future.status == "pending"]

    def _position(self) -> str:
        """Return where the run is: the first pending iteration, else the start or the end."""
        if self._pending:
            return str(self._pending[0].iteration)
        if self._finishing:
            return "the end"
        return "the start"
