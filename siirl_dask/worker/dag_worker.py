"""A Dask plugin on each worker of a run: builds the worker's roles once, and runs its chain in
each iteration.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from distributed import Worker, WorkerPlugin
from distributed.metrics import context_meter
from siirl_storage import set_retry_seconds

from siirl_dask.context import Device, Rank
from siirl_dask.dask_internals import handle_messages, plugin_of, releases_of
from siirl_dask.devices.accelerator import name_if_faster_in_bfloat16
from siirl_dask.devices.cpus import CpuBinding
from siirl_dask.errors import PeerError
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import pack
from siirl_dask.planner import Iteration, Plan
from siirl_dask.trace import Lane
from siirl_dask.worker.executor import ChainRun, WorkerRuntime
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.groups import stuck_collectives
from siirl_dask.worker.groups.joined_groups import JoinedGroups, join_groups
from siirl_dask.worker.hardware.devices import bind
from siirl_dask.worker.lagged import PastIterations
from siirl_dask.worker.monitoring.activity import counts_as_progress, stacks
from siirl_dask.worker.monitoring.heartbeats import Heartbeats
from siirl_dask.worker.monitoring.profiling import Profiling
from siirl_dask.worker.monitoring.scheduler_patience import no_heartbeats
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.monitoring.tracing import Tracing
from siirl_dask.worker.monitoring.worker_meter import WorkerMeter
from siirl_dask.worker.named_errors import portable
from siirl_dask.worker.node_call import NodeCalls
from siirl_dask.worker.packed_state import restore_packed_state
from siirl_dask.worker.peers.peer_services import PeerServices
from siirl_dask.worker.phase_loaders import PhaseLoaders
from siirl_dask.worker.process.end import end_with
from siirl_dask.worker.release import Release, await_all
from siirl_dask.worker.roles.lazy_role import models_used
from siirl_dask.worker.roles.role_state import (
    BuiltRoles,
    CheckpointWriter,
    RoleStates,
    StateStore,
    build_roles,
)
from siirl_dask.worker.run_spec import RunSpec, deserialize_phases
from siirl_dask.worker.stages import table_writer
from siirl_dask.worker.stop import ABORT, StopFlag, TaskOrder

logger = logging.getLogger("siirl_dask.worker")
_PATIENCE = 2.0  # seconds for a task to notice that its run was stopped
_STUCK_AFTER = 3.0  # seconds after which it may wait for a peer that stands still


class DAGWorker(WorkerPlugin):
    """Dask plugin, one per worker process; the driver calls it through the tasks in tasks.py."""

    def __init__(self, spec: RunSpec) -> None:
        self.name = spec.plugin
        self.spec = spec

    def __getstate__(self) -> dict[str, Any]:
        # compressed it is a fifth of the size
        return {"name": self.name, "spec": zlib.compress(pickle.dumps(self.spec))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name = state["name"]
        self.spec = pickle.loads(zlib.decompress(state["spec"]))

    async def setup(self, worker: Worker) -> None:
        try:
            await self._set_up(worker)
            return
        except Exception as error:
            failure = portable(error, str(worker.name))
        raise failure

    async def _set_up(self, worker: Worker) -> None:
        hide()
        end_with(worker)
        set_retry_seconds(self.spec.retry_seconds)
        self.worker_name = str(worker.name)
        self._worker = worker
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.stop = StopFlag()
        self.task_order = TaskOrder(self.stop)
        self.tracing = Tracing(self.spec, self.worker_name)
        self.progress = TaskProgress(self.tracing.recorder)
        self._runtime: WorkerRuntime | None = None
        self._built: BuiltRoles | None = None
        self._device: Device | None = None
        self._cpus = CpuBinding()
        self._peers: PeerServices | None = None
        self._meter: WorkerMeter | None = None
        self._started = False
        self._checkpoints: CheckpointWriter | None = None
        positions = {} if self.spec.resume_from is None else self.spec.resume_from.positions
        self._loaders = PhaseLoaders(positions)
        self.release = Release(self._free, self.progress)
        releases: list[Release] = releases_of(worker)
        self._earlier_releases = list(releases)
        releases.append(self.release)
        if self.spec.members.get(self.worker_name) != worker.address:
            return  # a worker that joined or reconnected after the start is not part of this run
        handle_messages(worker, ABORT, partial(_on_abort_message, worker))
        self._phases = deserialize_phases(self.spec.phases, list(self.spec.members))
        peers = await self._serve_peers(worker)
        self._heartbeats = Heartbeats(
            worker=worker,
            plugin=self.name,
            progress=self.progress,
            tracing=self.tracing,
            databuffer=peers.databuffer,
            device=lambda: self._device,
        )
        self._scheduler_watch = asyncio.create_task(self._watch_scheduler())

    async def _serve_peers(self, worker: Worker) -> PeerServices:
        """Start the services that answer this worker's peers, and its meter."""
        self._past_iterations = PastIterations(
            {name: plan.chains.values() for name, (plan, _) in self._phases.items()}
        )
        peers = PeerServices(worker, self.spec, self._phases, self.progress.trace)
        self._peers = peers
        self._meter = WorkerMeter.of(self.spec.name, self.worker_name)
        if self._meter is not None:
            self._meter.begin(self.progress, peers.databuffer, lambda: self._device)
            self.tracing.listener = self._meter.spans
        await peers.start()
        self.port = peers.port
        return peers

    async def teardown(self, worker: Worker) -> None:
        if hasattr(self, "_scheduler_watch"):
            self._heartbeats.end()
            self._scheduler_watch.cancel()
        self.abort("the run is over")
        await asyncio.to_thread(self.release.end, _PATIENCE)
        releases_of(worker).remove(self.release)
        if self._peers is not None:
            if self._meter is not None:
                self._meter.end(self._peers.databuffer)
            await self._peers.close()

    def bind_device(self) -> None:
        """Make this worker's device the current one of this thread: Dask runs a task in any
        thread of its pool.
        """
        if self._device is not None:
            bind(self._device)

    def start(self, ports: Sequence[int]) -> None:
        """Join the process groups and build this worker's roles; runs as a task, once.

        ``ports`` are those of all members, in rank order.
        """
        peers = self._peers
        assert peers is not None
        peers.check()
        port_of = dict(zip(self.spec.members, ports, strict=True))
        self._loop.call_soon_threadsafe(peers.meet, port_of)
        plan, _ = self._phases[self.spec.builds_from]
        self._built = self._reusable_roles(plan)
        torch.set_num_threads(self.spec.threads)
        self._started = True
        # an earlier run that failed in this process may not have left its groups
        groups.leave(abort=True)
        with self.progress.at("the joining of the process groups"), self.progress.waiting():
            joined = join_groups(
                spec=self.spec,
                worker=self.worker_name,
                plan=plan,
                store=peers.store,
                transport=peers.transport,
                stop=self.stop,
                binding=self._cpus,
            )
        self._device = joined.device
        reused: Mapping[str, Any] = {}
        if self._built is not None:
            reused = self._built.for_device(joined.device)
        self._built = None
        device = replace(
            self.progress.with_callbacks(joined.device),
            bind=partial(bind, joined.device),
            models=self.spec.models,
        )
        with counts_as_progress(self.progress):
            resources = build_roles(plan.dag.roles, device, joined.ranks, self.progress, reused)
        self._built = BuiltRoles(joined.device, resources)
        accelerator = name_if_faster_in_bfloat16(torch.device(device.torch_name))
        self._report({"kind": "built", "kept": sorted(reused), "accelerator": accelerator})
        if self.spec.store is not None:
            self._restore(self.spec.store, joined.ranks, resources)
        self._runtime = self._make_runtime(plan, peers, joined, device, resources)
        restore_packed_state(self._runtime, plan, self.spec.stored_state)

    def _reusable_roles(self, plan: Plan) -> BuiltRoles | None:
        """Wait until earlier runs have left this process, and return the roles of the run that this
        one follows that can be reused; None where it has built nothing here.
        """
        with self.progress.at("the wait for an earlier run to leave this process"):
            followed = plugin_of(self._worker, self.spec.follows)
            built: BuiltRoles | None = None
            if isinstance(followed, DAGWorker):
                built = followed.hand_over(self.progress, self.stop)
            await_all(self._earlier_releases, self.worker_name, self.stop)
        if built is None:
            return None
        return built.reusable(
            self.worker_name, plan.placement, resumes=self.spec.resume_from is not None
        )

    def _restore(
        self, store: StateStore, ranks: Mapping[str, Rank], resources: Mapping[str, Any]
    ) -> None:
        """Load the checkpoint that the run resumes from into its roles, and prepare to write
        checkpoints of them.
        """
        side_groups = {role: rank.side_group for role, rank in ranks.items()}
        states = RoleStates(store, resources, side_groups, self.progress.beat)
        if self.spec.resume_from is not None:
            span = self.progress.trace.span(Lane.STORAGE, "read", "checkpoint")
            place = self.progress.at("the loading of the checkpoint")
            with span, place, counts_as_progress(self.progress):
                states.restore(self.spec.resume_from)
        self._checkpoints = CheckpointWriter(
            states,
            self._loaders,
            report=self._report,
            loop=self._loop,
            stop=self.stop,
            trace=self.progress.trace,
        )

    def _make_runtime(
        self,
        plan: Plan,
        peers: PeerServices,
        joined: JoinedGroups,
        device: Device,
        resources: Mapping[str, Any],
    ) -> WorkerRuntime:
        role_peers = {}
        for role, rank in joined.ranks.items():
            role_peers[role] = groups.RolePeers(rank, self.stop, self.progress)
        _, dataset = self._phases[self.spec.builds_from]
        return WorkerRuntime(
            device=device,
            profiling=Profiling(self.spec.profile, self.spec.url, device),
            run_url=self.spec.url,
            stages=table_writer(self.spec, self._report, self.stop, self.progress.trace),
            read_limit=dataset.sources[0].read_limit,
            run_seed=self.spec.seed,
            skip_nonfinite=self.spec.skip_nonfinite,
            resources=resources,
            ranks=joined.ranks,
            peers=role_peers,
            share_work=peers.share_work(plan.placement, self.stop),
            databuffer=peers.databuffer,
            loop=self._loop,
            stop=self.stop,
            meter=context_meter.meter,
            digest=context_meter.digest_metric,
            stream_bytes=self.spec.data.stream_bytes,
            broadcasts=joined.broadcasts,
            overlap=plan.overlap,
            progress=self.progress,
        )

    def run_chain(self, iteration: Iteration, completed: int) -> None:
        """Run the iteration's chain and report the logged metrics.

        All workers have completed the iterations before sequence number ``completed``.
        """
        runtime = self._begin_iteration(iteration, completed)
        plan, dataset = self._phases[iteration.plan]
        chain = plan.chains[self.worker_name]
        loader = None
        if chain.loads or iteration.position is not None:
            loader = self._loaders.get(iteration, dataset)
        calls = NodeCalls(runtime, iteration, loader)
        metrics = ChainRun(calls, self._past_iterations).run(chain)
        if self._meter is not None:
            self._meter.iteration(str(iteration.phase), metrics)
        self._report(
            {
                "kind": "done",
                "sequence": iteration.sequence,
                "metrics": pack(metrics),
                "tables": chain.saved if runtime.stages.reports else [],
                "phase": str(iteration.phase),
                "step": iteration.step,
            }
        )

    def finish(self) -> None:
        """Write the rest of the trace, and free the roles as this task ends."""
        self.tracing.finish()
        self.release.end(0.0)

    def save(self, iteration: Iteration, url: str, completed: int) -> None:
        """Begin to write this worker's part of a checkpoint at ``url``, once that of the
        previous one is written.
        """
        self._begin_iteration(iteration, completed)
        assert self._checkpoints is not None
        self._checkpoints.save(iteration, url)

    def _begin_iteration(self, iteration: Iteration, completed: int) -> WorkerRuntime:
        if self._runtime is None or self._peers is None:
            raise PeerError(
                f"worker {self.worker_name!r} has not been started for run {self.spec.run!r}"
            )
        self.tracing.begin(iteration)
        # not before the first iteration: a peer that builds its roles may not answer
        self._loop.call_soon_threadsafe(self._peers.watch_next, self._report_silence)
        needed = self._past_iterations.begin(iteration, completed)
        self._loop.call_soon_threadsafe(self._peers.begin, iteration.sequence, needed, completed)
        return self._runtime

    def position(self) -> str:
        """Return a description of where this worker's task is; another thread than the task's
        calls this.
        """
        place = self.progress.place
        return place if place else "a task of the run"

    def beats_inside(self) -> int | None:
        """Return the number of beats of the tasks that are running; None if no task is running."""
        return self.progress.beats if self.release.inside else None

    def describe_wait(self) -> dict[str, object]:
        """Return where this worker's task is, whom it waits for, and its stacks; the event
        loop's thread calls this.
        """
        pending_replies: list[list[object]] = []
        if self._peers is not None:
            pending_replies = self._peers.pending_replies()
        return {
            "place": self.progress.place,
            "waits": self.progress.waits,
            "owed": pending_replies,
            "stacks": stacks(self.progress.thread),
        }

    def models_used(self) -> list[str]:
        """Return the roles with a state, among those built when they are used, that a node has
        asked for.
        """
        if self._built is None:
            return []
        return models_used(self._built.resources)

    async def _watch_scheduler(self) -> None:
        """Stop the run and free its memory once the scheduler answers no heartbeat: nobody else
        would do so.
        """
        reason = await no_heartbeats(
            self.progress, self.spec.data.peer_timeout, self._worker.scheduler.address
        )
        logger.error("run %s is stopped: %s", self.spec.run, reason)
        self.abort(reason)
        await asyncio.to_thread(self.release.end, _PATIENCE)

    def _report(self, event: dict[str, Any]) -> None:
        self._worker.log_event(self.spec.topic, {"member": self.worker_name, **event})

    def hand_over(self, next_progress: TaskProgress, stop: StopFlag) -> BuiltRoles | None:
        """Return what this run has built, for the next run, once its tasks have left; None if
        nothing is there.

        Reused objects report to this run's progress, which forwards to ``next_progress``.
        """
        self.progress.forward_to(next_progress)
        self.abort("the run is tried again")
        if not self.release.hand_over(self.worker_name, stop):
            return None
        # the thread is the next run's, which may close objects that it does not reuse
        self.bind_device()
        built = self._built
        self._built = None
        self._close_connections()
        return built

    def _free(self) -> None:
        """Free everything that ``start`` built."""
        self.bind_device()
        if self._built is not None:
            self._built.close()
        self._built = None
        self._close_connections()
        if self._started:  # otherwise the groups in this process may be another run's
            groups.leave(abort=self.stop.is_set())

    def _close_connections(self) -> None:
        self._cpus.undo()
        self._loaders.close()
        self.tracing.close()
        if self._runtime is not None:
            self._runtime.stages.close()
        self._runtime = None
        self._checkpoints = None

    def _report_silence(self, message: str) -> None:
        if not self.stop.is_set():
            self._report(
                {"kind": "silent", "what": message, "silence": self.spec.data.peer_timeout}
            )

    def abort(self, reason: str) -> None:
        """Wake every wait of this worker and stop its chain at the next link."""
        self.stop.set(reason)
        if self._peers is not None:
            self._peers.abort(reason)
            self._loop.call_soon_threadsafe(
                self._loop.call_later, _STUCK_AFTER, self._end_stuck_collectives
            )

    def _end_stuck_collectives(self) -> None:
        """End the collectives of a task that is still running a while after the run was stopped."""
        stuck_collectives.end_in_thread(groups.epoll_descriptors(), self.release.if_inside)


def _on_abort_message(worker: Worker, plugin: str, reason: str) -> None:
    """Abort the run that ``plugin`` names.

    This handler stays registered when a run is over: an abort may arrive late, and Dask closes a
    worker that has no handler for a message.
    """
    running = plugin_of(worker, plugin)
    if isinstance(running, DAGWorker):
        running.abort(reason)
