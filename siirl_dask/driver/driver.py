"""Submits iterations to the workers a few steps ahead, and receives metrics and failures, never a sample."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import Any

from distributed import Client, Future
from siirl_storage.digests import FileDigest

from siirl_dask.config import ClusterConfig
from siirl_dask.driver.busy_workers import warn_of_busy_workers, where_they_are
from siirl_dask.driver.calls import SLICE, submit
from siirl_dask.driver.failures import FAILURES, failure_of
from siirl_dask.driver.run_on_cluster import RunOnCluster
from siirl_dask.driver.staged_tables import StagedTables
from siirl_dask.driver.under_way import Done, Pending, Staged, Writing, Written
from siirl_dask.driver.who_waits import failure_of_hang, report_on
from siirl_dask.errors import RunError, SchedulerLost, SiirlError
from siirl_dask.observe import merge, unpack
from siirl_dask.planner import Iteration, Phase
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.task_progress import Reading
from siirl_dask.worker.tasks import finish_worker, run_chain, save_worker, start_worker

_TELLS = 4  # times that workers' progress is told within the shortest time that may pass without it
_TELL_EVERY = 4.0  # seconds at most, for those who watch
_CLOSE_TIMEOUT = 30.0  # seconds for every worker to free its model
_STOP_TIMEOUT = 2.0  # seconds for workers to notice an abort before the cluster is closed


class Driver:
    """Runs iterations on the workers of a run."""

    def __init__(
        self,
        client: Client,
        spec: RunSpec,
        lookahead: int,
        stall_timeout: float,
        folder: Callable[[int], str],
        on_progress: Callable[[int, str], None] = lambda beats, place: None,
        on_idle: Callable[[], None] | None = None,
        node_timeout: float = 0.0,
    ) -> None:
        """``folder(step)`` returns the URL of a new folder for the checkpoint of a step.

        ``on_progress`` is called every few seconds in which something got done, with the number of all that workers
        have got done so far, samples, micro-batches, rows and so on, and where most of them are. ``on_idle`` is called
        when there are new workers that no run uses; None if the run could not take them. A node that gets nothing done
        on a worker for ``node_timeout`` seconds fails the run; 0: it may take any time.
        """
        self._client = client
        self._spec = spec
        self._lookahead = lookahead
        self._stall_timeout, self._node_timeout = stall_timeout, node_timeout
        self._folder, self._on_progress, self._on_idle = folder, on_progress, on_idle
        self._writing: dict[int, Writing] = {}
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._pending: deque[Pending] = deque()
        self._tables = StagedTables(spec.members)
        self._last: dict[str, Future[Any]] = {}
        self._turn = 0
        self._on_cluster = RunOnCluster(client, spec, self._events.put)
        self.kept: dict[str, list[str]] = {}
        """Roles that each worker has taken over from an earlier run, instead of building them."""
        self.accelerators: set[str] = set()
        """Names of the workers' accelerators that are faster in bfloat16 than in float32."""
        self._finishing = False

    @property
    def plugin(self) -> str:
        """Name of the run's plugins on scheduler and workers."""
        return self._spec.plugin

    @contextmanager
    def at_work(
        self,
        cluster: ClusterConfig,
        on_failure: Callable[[SiirlError], bool | None],
        earlier: Driver | None = None,
    ) -> Iterator[None]:
        """Build every worker's roles, and free them on the way out; an exception inside stops the workers.

        ``on_failure`` is called with a failure at once: to stop workers that do not answer takes seconds. When it
        returns True, the run is tried again, and the workers keep what they have built until ``close``. The run of
        ``earlier`` was kept so: this one takes over from it, and closes it.
        """
        kept = False
        try:
            try:
                self.start(cluster.start_timeout, stays=cluster.exists)
            finally:
                if earlier is not None:
                    earlier.close()
            yield
            self.finish(_CLOSE_TIMEOUT)
        except BaseException as error:
            if isinstance(error, SchedulerLost):
                error.may_return = cluster.scheduler_may_return
            kept = isinstance(error, SiirlError) and bool(on_failure(error))
            self.abort(f"the run was stopped: {type(error).__name__}")
            raise
        finally:
            if not kept:
                self._on_cluster.stop_watching()
                if cluster.exists and self._on_cluster.there:
                    warn_of_busy_workers(self._client, self._spec, self._busy_workers())
                    self.close()  # a cluster that was started for this run ends with it

    def start(self, timeout: float, *, stays: bool = False) -> None:
        """Register the run on the cluster and build every worker's roles. Raises what a role's build raised.

        ``stays``: the cluster stays when this process ends, however that happens.
        """
        tell_every = min(timeout / _TELLS, self._stall_timeout / _TELLS, _TELL_EVERY)
        watched: dict[str, Any] = {"elastic": self._on_idle is not None, "node_timeout": self._node_timeout}
        ports = self._on_cluster.register(stays, tell_every, self._handle_waiting, **watched)
        self._last = self._submit("start", start_worker, ports=ports)
        self._await_all(self._last, timeout, "the start", "cluster.start_timeout")

    def run(self, iterations: Iterator[Iteration]) -> Iterator[Done | Staged | Written]:
        """Yield each iteration that all workers have completed, each table and each checkpoint once it is written.

        The next iterations are under way by then. A table may come while its iteration goes on, or some iterations
        later; a checkpoint comes after all tables of the steps up to it. Raises the run's
        failure: WorkerLost names the worker and the step, CheckpointError a folder that cannot be written; any other
        exception comes from a node.
        """
        since = time.monotonic()
        while True:
            while len(self._pending) <= self._lookahead and (iteration := next(iterations, None)) is not None:
                self._hand_out(iteration)
            while (staged := self._tables.pop()) is not None:
                yield staged
            while (written := self._next_written()) is not None:
                yield written
            if not self._pending and not self._writing and self._tables.first_awaited is None:
                return
            if not self._pending or len(self._pending[0].logged) < len(self._spec.members):
                self._handle(self._next_event(self._stall_timeout, self._place(), "cluster.stall_timeout"))
                continue
            head = self._pending.popleft()
            self._tables.end(head.iteration.sequence)
            now = time.monotonic()
            metrics = merge([head.logged[worker] for worker in self._spec.members])
            yield Done(head.iteration, now - since, metrics)
            since = now

    def _next_written(self) -> Written | None:
        """Return a written checkpoint whose iteration was yielded before, if there is one."""
        heads = [pending.iteration.sequence for pending in self._pending]
        awaited = self._tables.first_awaited
        first = min(heads if awaited is None else [awaited, *heads], default=None)
        for sequence, writing in self._writing.items():
            done = first is None or sequence < first
            if done and len(writing.written) == len(self._spec.members):
                del self._writing[sequence]
                saved = [writing.saved[worker] for worker in self._spec.members]
                files = {name: digest for own in writing.written.values() for name, digest in own.items()}
                return Written(writing.iteration, writing.url, saved, files)
        return None

    def traffic(self) -> int | None:
        """Return the bytes through the scheduler and the client since ``start``; None where they cannot be counted."""
        return self._on_cluster.traffic()

    def abort(self, reason: str) -> None:
        """Tell every worker to stop, and wait up to two seconds until they have."""
        if not self._on_cluster.there:
            return
        self._on_cluster.abort(reason)
        deadline, there = time.monotonic() + _STOP_TIMEOUT, self._on_cluster.present()
        while time.monotonic() < deadline and self._pending and there & {*self._busy_workers()}:
            time.sleep(0.05)

    def finish(self, timeout: float) -> None:
        """Have every worker free what it built."""
        self._finishing = True
        self._last = self._submit("finish", finish_worker)
        self._await_all(self._last, timeout, "the end", "the time for workers to free what they built")

    def close(self) -> None:
        """Take the run off the cluster."""
        self._pending.clear()
        self._last = {}
        self._on_cluster.leave()

    def cut_off(self) -> None:
        """Leave the run where it is, and ask nobody: the cluster is gone, or goes."""
        self._on_cluster.cut_off()
        self.close()

    def _busy_workers(self) -> list[str]:
        """Return the workers that are still in the first iteration under way, or still building their roles."""
        futures = self._pending[0].futures if self._pending else self._last
        return [worker for worker, future in futures.items() if future.status == "pending"]

    def _hand_out(self, iteration: Iteration) -> None:
        """Submit an iteration to all workers."""
        completed = self._pending[0].iteration.sequence if self._pending else iteration.sequence
        name, arguments = str(iteration.phase), {"iteration": astuple(iteration), "completed": completed}
        if iteration.phase is Phase.CHECKPOINT:
            url = self._folder(iteration.step)
            self._writing[iteration.sequence] = Writing(iteration, url)
            self._last = self._submit(name, save_worker, **arguments, url=url)
        else:
            self._last = self._submit(name, run_chain, **arguments)
        self._pending.append(Pending(iteration, self._last))

    def _submit(self, what: str, function: Callable[..., None], **arguments: Any) -> dict[str, Future[Any]]:
        """Submit one task to each worker, whose next turn it is."""
        spec = self._spec
        futures = submit(
            self._client, spec.plugin, what, spec.name, spec.members, function, turn=self._turn, **arguments
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

    def _await_all(self, futures: dict[str, Future[Any]], timeout: float, place: str, limit: str) -> None:
        waiting = {future.key for future in futures.values()}
        while waiting:
            event = self._next_event(timeout, place, limit)
            waiting.discard(event.get("key"))
            self._handle(event)

    def _next_event(self, timeout: float, place: str, limit: str) -> dict[str, Any]:
        """Return the next event; the supervisor sends one as long as anything gets done on a worker.

        Waits in slices, so that Ctrl-C is noticed. RunError after ``timeout`` seconds of silence, which ``limit`` sets.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self._events.get(timeout=min(left, SLICE))
            except queue.Empty:
                continue
        raise self._stall(f"{place}: nothing got done within {timeout:g} s ({limit})")

    def _stall(self, what: str) -> RunError:
        """Return the failure of a run in which all workers are silent, with where they are and who waits for whom."""
        try:
            readings = self._on_cluster.readings()
        except OSError:
            return RunError(f"{what}: and the scheduler does not say where the workers are")
        stall = RunError(f"{what}: {self._where_they_are(readings)}")
        hanging = [worker for worker, at in readings.items() if at.place and not at.waits]
        stall.report = report_on(self._client, self._spec, hanging)
        return stall

    def _where_they_are(self, readings: Mapping[str, Reading]) -> str:
        late = [
            (worker, writing.url)
            for writing in self._writing.values()
            for worker in self._spec.members
            if worker not in writing.written
        ]
        return where_they_are({worker: readings[worker] for worker in self._busy_workers()}, late)

    def _handle_waiting(self) -> None:
        with suppress(queue.Empty):
            self._handle(self._events.get_nowait())

    def _handle(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "done":
                pending = next(p for p in self._pending if p.iteration.sequence == event["sequence"])
                pending.logged[event["member"]] = unpack(event["metrics"])
                self._tables.await_tables(event["sequence"], event.get("tables", ()))
                if "saved" in event:
                    self._writing[event["sequence"]].saved[event["member"]] = event["saved"]
            case "staged":
                self._tables.report(event)
            case "written":
                files = {name: FileDigest(nbytes, digits) for name, (nbytes, digits) in event["files"].items()}
                self._writing[event["sequence"]].written[event["member"]] = files
            case kind if kind in FAILURES:
                raise failure_of(event, self._events, self._place())
            case "hung":
                raise failure_of_hang(self._client, self._spec, event["silent"], self._place())
            case "no scheduler":
                self._on_cluster.cut_off()
                raise SchedulerLost(f"{self._place()}: {event['what']}; what was written is whole")
            case "built":
                self.kept[event["member"]] = list(event["kept"])
                if event["accelerator"]:
                    self.accelerators.add(event["accelerator"])
            case "progress":
                self._on_progress(event["beats"], event["place"])
            case "idle" if self._on_idle is not None:
                self._on_idle()
            case "finished":
                pass

    def _place(self) -> str:
        """Return where the run is: the first iteration under way, else the start or the end."""
        return str(self._pending[0].iteration) if self._pending else "the end" if self._finishing else "the start"
