"""Runs many workers in one process: the real executor, databuffer and planner, with function calls
as transport.

It serves tests of DAGs and of the data plane that need no cluster:

    with LocalPool(plan, source, url=str(tmp_path)) as pool:
        metrics = pool.run(step=1)

Roles are built as on a cluster but without process groups, so a trainer that learns needs a role of
one worker.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from math import fsum
from types import TracebackType
from typing import Any

import torch.distributed as dist

from siirl_dask.collectives import LOOPBACK, new_gloo_group
from siirl_dask.config import ProfileConfig, RolloutConfig, parse_bytes
from siirl_dask.context import Device, Metric, Rank
from siirl_dask.coordinator import Dataset
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.databuffer.serving import Window
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request
from siirl_dask.observe import merge
from siirl_dask.planner import Iteration, Phase, Plan, Stream
from siirl_dask.trace import Recorder
from siirl_dask.worker.executor import ChainRun, WorkerRuntime
from siirl_dask.worker.lagged import PastIterations
from siirl_dask.worker.monitoring.profiling import Profiling
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.node_call import NodeCalls
from siirl_dask.worker.peers.work_stealing import ExpectedWork, StealableQueues, StealService
from siirl_dask.worker.stages import PlainWriter
from siirl_dask.worker.stop import StopFlag
from siirl_dask.worker.weight_broadcast import Broadcast

RUN = "pool"


@dataclass(slots=True)
class LocalTransport:
    """Calls the other worker's handler and copies the frames, as a network would."""

    handlers: dict[str, Handler]
    payload: int = 0
    """Bytes of all replies so far."""

    async def request(self, worker: str, request: Request) -> Reply:
        """Return the reply of ``worker``."""
        reply = await self.handlers[worker](request)
        frames = [bytes(frame) for frame in reply.frames]
        self.payload += sum(map(len, frames))
        return Reply(reply.header, frames)


@dataclass
class LocalPool:
    """Workers of a plan in threads of this process. Use it as a context manager."""

    plan: Plan
    source: Dataset
    url: str
    """Folder for the tables that nodes save."""
    seed: int = 0
    stream_bytes: int = parse_bytes("rollout.weight_bucket", RolloutConfig().weight_bucket)
    """Largest table of a weight stream, unless one parameter is larger."""
    broadcast: bool = False
    """Weight streams that can use a broadcast do, over gloo."""
    prefetch: bool | None = None
    """See ``data.prefetch``."""
    limits: BufferLimits = field(default_factory=BufferLimits)
    trace: bool = False
    """Record what each worker does in ``traces``."""
    handlers: dict[str, Handler] = field(default_factory=dict, init=False)
    transport: LocalTransport = field(init=False)

    def __post_init__(self) -> None:
        self.transport = LocalTransport(self.handlers)
        self.stop = StopFlag()
        self._sequence = 0
        self._first: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.workers = tuple(self.plan.chains)
        self.traces = {worker: Recorder(enabled=self.trace) for worker in self.workers}
        self._peers = {
            role: ThreadPeers(len(workers)) for role, workers in self.plan.placement.items()
        }
        self._stealings: dict[str, StealService] = {}
        self._windows: dict[str, Window] = {}
        self.databuffers = {worker: self._databuffer(worker) for worker in self.workers}
        self._broadcasts = (
            broadcasts(self.plan, self.stop, self.stream_bytes) if self.broadcast else {}
        )
        self._runtimes = {worker: self._runtime(worker) for worker in self.workers}
        self._loaders = {worker: Dataloader(self.source) for worker in self.workers}
        chains = {"train": tuple(self.plan.chains.values())}
        self._histories = {worker: PastIterations(chains) for worker in self.workers}

    def run(self, step: int = 1) -> dict[str, Metric]:
        """Run one step on every worker, each in its own thread. Raises what the first worker to
        fail raised.
        """
        iteration = Iteration(Phase.TRAIN, step, self._sequence)
        self._sequence += 1
        with ThreadPoolExecutor(len(self.workers)) as threads:
            running = [threads.submit(self._run_one, worker, iteration) for worker in self.workers]
            failed = [error for future in running if (error := future.exception())]
        if failed:
            raise self._first or failed[0]
        self.wait_for_acks()
        return merge([future.result() for future in running])

    def wait_for_acks(self) -> None:
        """Wait until sources have heard which of their rows have arrived."""
        for databuffer in self.databuffers.values():
            asyncio.run_coroutine_threadsafe(databuffer.wait_for_acks(), self._loop).result()

    def resources(self, worker: str) -> Mapping[str, Any]:
        """Return the objects that the roles of ``worker`` built, by role."""
        return self._runtimes[worker].resources

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for loader in self._loaders.values():
            loader.close()
        for databuffer in self.databuffers.values():
            self._loop.call_soon_threadsafe(databuffer.close)
        asyncio.run_coroutine_threadsafe(_cancel_the_rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run_one(self, worker: str, iteration: Iteration) -> dict[str, Metric]:
        try:
            history = self._histories[worker]
            history.begin(iteration, iteration.sequence)
            self._loop.call_soon_threadsafe(self._windows[worker].begin, iteration.sequence)
            calls = NodeCalls(self._runtimes[worker], iteration, self._loaders[worker])
            self.traces[worker].begin(str(iteration.phase), iteration.sequence)
            with self.traces[worker].task():
                return ChainRun(calls, history).run(self.plan.chains[worker])
        except BaseException as error:
            if self._first is None:
                self._first = error
            reason = f"worker {worker!r} failed"
            self.stop.set(reason)  # as the supervisor does on a cluster
            for peers in self._peers.values():
                peers.barrier.abort()
            for databuffer in self.databuffers.values():
                self._loop.call_soon_threadsafe(databuffer.abort, reason)
            for stealing in self._stealings.values():
                self._loop.call_soon_threadsafe(stealing.abort, reason)
            raise

    def _databuffer(self, worker: str) -> Databuffer:
        edges = {f"train/{edge.name}": edge for edge in self.plan.edges}
        settings: dict[str, Any] = {
            "hosts": self.plan.hosts,
            "prefetch": self.prefetch,
            "limits": self.limits,
        }
        window = self._windows[worker] = Window(ahead=0)
        databuffer = Databuffer(RUN, worker, edges, self.transport, **settings, window=window)
        work = ExpectedWork(window, {f"train/{node.name}" for node in self.plan.dag.nodes})
        stealing = self._stealings[worker] = StealService(RUN, self.transport, work)

        async def handle(request: Request) -> Reply:
            return await (stealing if request.op in (Op.STEAL, Op.RETURN) else databuffer).handle(
                request
            )

        self.handlers[worker] = handle
        return databuffer

    def _runtime(self, worker: str) -> WorkerRuntime:
        progress = TaskProgress(self.traces[worker])
        device = progress.with_callbacks(Device(worker))
        roles = {role.name: role for role in self.plan.dag.roles}
        own = {name: members for name, members in self.plan.placement.items() if worker in members}
        ranks = {name: Rank(members.index(worker), len(members)) for name, members in own.items()}
        return WorkerRuntime(
            device=device,
            profiling=Profiling(ProfileConfig(), self.url, device),
            run_url=self.url,
            stages=PlainWriter(self.url),
            run_seed=self.seed,
            resources={name: roles[name].build(device, rank) for name, rank in ranks.items()},
            ranks=ranks,
            peers={name: self._peers[name].at(rank.rank) for name, rank in ranks.items()},
            share_work=StealableQueues(
                worker, self.plan.placement, self._stealings[worker], self._loop, self.stop
            ),
            databuffer=self.databuffers[worker],
            loop=self._loop,
            stop=self.stop,
            meter=lambda name: nullcontext(),
            stream_bytes=self.stream_bytes,
            broadcasts=self._broadcasts.get(worker, {}),
            overlap=self.plan.overlap,
            progress=progress,
        )


class ThreadPeers:
    """Implements collectives among threads; all threads must make the same calls in the same
    order.
    """

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self._values: dict[int, Any] = {}

    def at(self, rank: int) -> _ThreadPeer:
        """Return the collectives of the thread with this rank."""
        return _ThreadPeer(self, rank)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all threads, in the order of ranks."""
        self._values[rank] = value
        self.barrier.wait()
        values = [self._values[rank] for rank in sorted(self._values)]
        self.barrier.wait()  # no thread may write its next value before all have read these
        return values


@dataclass(frozen=True, slots=True)
class _ThreadPeer:
    peers: ThreadPeers
    rank: int

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return [
            fsum(numbers) for numbers in zip(*self.peers.gather(self.rank, values), strict=True)
        ]

    def all_gather(self, message: bytes) -> list[bytes]:
        return self.peers.gather(self.rank, message)


async def _cancel_the_rest() -> None:
    """Cancel requests between workers that still wait when the pool is closed."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


# seconds for which a collective under way keeps its group alive after a worker failed
_TIMEOUT = 4.0


def broadcasts(
    plan: Plan, stop: StopFlag, stream_bytes: int
) -> dict[str, dict[tuple[str, ...], Broadcast]]:
    """Make a broadcast for each stream of ``plan`` that may use one; by worker and by the
    workers that take part.
    """
    links = [link for chain in plan.chains.values() for link in chain.flat]
    by_worker: dict[str, dict[tuple[str, ...], Broadcast]] = {worker: {} for worker in plan.chains}
    for joins in dict.fromkeys(
        link.joins for link in links if isinstance(link, Stream) and link.joins
    ):
        groups = dict(zip(joins, _groups(len(joins)), strict=True))
        for worker in plan.chains:
            by_worker[worker][joins] = Broadcast(
                members=joins,
                group=groups.get(worker),
                device="cpu",
                stop=stop,
                max_bytes=stream_bytes,
            )
    return by_worker


def _groups(size: int) -> list[Any]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # no stubs
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: _group(store, rank, size), range(size)))


def _group(store: Any, rank: int, size: int) -> Any:
    return new_gloo_group(store, rank, size, LOOPBACK, timedelta(seconds=_TIMEOUT))
