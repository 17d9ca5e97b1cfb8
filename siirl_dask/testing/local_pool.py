"""Many workers in one process: the real executor, databuffer and planner over a transport that is a function call.

For tests of DAGs and of the data plane, without a cluster:

    with LocalPool(plan, source, url=str(tmp_path)) as pool:
        metrics = pool.run(step=1)

Roles are built as on a cluster but without process groups, so a trainer that learns needs a role of one worker.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import fsum
from types import TracebackType
from typing import Any

from siirl_dask.config import RolloutConfig, parse_bytes
from siirl_dask.context import Device, Metric, Rank
from siirl_dask.coordinator.databuffer import Databuffer
from siirl_dask.coordinator.dataloader import Dataloader, Source
from siirl_dask.coordinator.messages import Handler, Op, Reply, Request, Turn
from siirl_dask.coordinator.stealing import Stealing
from siirl_dask.observe.metrics import merge
from siirl_dask.planner import Plan
from siirl_dask.testing.broadcasts import broadcasts
from siirl_dask.worker.executor import Bench, Execution
from siirl_dask.worker.history import History
from siirl_dask.worker.sharing import Sharing
from siirl_dask.worker.stop import StopFlag

RUN = "pool"


@dataclass(slots=True)
class LocalTransport:
    """Calls the other worker's handler, after copying the frames as a network would."""

    handlers: dict[str, Handler]
    payload: int = 0
    """Bytes of all replies so far."""

    async def request(self, worker: str, request: Request) -> Reply:
        reply = await self.handlers[worker](request)
        frames = [bytes(frame) for frame in reply.frames]
        self.payload += sum(map(len, frames))
        return Reply(reply.header, frames)


@dataclass
class LocalPool:
    plan: Plan
    source: Source
    url: str
    seed: int = 0
    part: int = parse_bytes("rollout.weights_bucket", RolloutConfig().weights_bucket)
    """Bytes at most of what moves at once of a table that moves in parts."""
    broadcast: bool = False
    """What can go from device to device does, over gloo."""
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
        self._stealings: dict[str, Stealing] = {}
        self.databuffers = {worker: self._databuffer(worker) for worker in self.workers}
        self._broadcasts = broadcasts(self.plan, self.stop, self.part) if self.broadcast else {}
        self._benches = {worker: self._bench(worker) for worker in self.workers}
        self._loaders = {worker: Dataloader(self.source) for worker in self.workers}
        chains = {"train": tuple(self.plan.chains.values())}
        self._histories = {worker: History(chains) for worker in self.workers}
        self._sums = {role: Sum(len(workers)) for role, workers in self.plan.placement.items()}

    def run(self, step: int = 1) -> dict[str, Metric]:
        """One step of every worker, each in a thread of its own. Raises what the first worker that failed raised."""
        turn = Turn("train", step, self._sequence)
        self._sequence += 1
        with ThreadPoolExecutor(len(self.workers)) as threads:
            running = [threads.submit(self._run_one, worker, turn) for worker in self.workers]
            failed = [error for future in running if (error := future.exception())]
        if failed:
            raise self._first or failed[0]
        for databuffer in self.databuffers.values():
            asyncio.run_coroutine_threadsafe(databuffer.settle(), self._loop).result()
        return merge([future.result() for future in running])

    def resources(self, worker: str) -> Mapping[str, Any]:
        return self._benches[worker].resources

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for loader in self._loaders.values():
            loader.close()
        for databuffer in self.databuffers.values():
            self._loop.call_soon_threadsafe(databuffer.close)
        asyncio.run_coroutine_threadsafe(_cancel_the_rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run_one(self, worker: str, turn: Turn) -> dict[str, Metric]:
        try:
            history = self._histories[worker]
            history.enter(turn, turn.sequence)
            execution = Execution(self._benches[worker], turn, self._loaders[worker], history)
            return execution.run(self.plan.chains[worker])
        except BaseException as error:
            self._first = self._first or error
            reason = f"worker {worker!r} failed"
            self.stop.set(reason)  # as the supervisor does on a cluster
            for waiting in self._sums.values():
                waiting.barrier.abort()
            for databuffer in self.databuffers.values():
                self._loop.call_soon_threadsafe(databuffer.abort, reason)
            for stealing in self._stealings.values():
                self._loop.call_soon_threadsafe(stealing.abort, reason)
            raise

    def _all_sum(self, role: str, values: Sequence[float]) -> list[float]:
        return self._sums[role].of(values)

    def _databuffer(self, worker: str) -> Databuffer:
        edges = {f"train/{edge.name}": edge for edge in self.plan.edges}
        databuffer = Databuffer(RUN, worker, edges, self.transport)
        stealing = self._stealings[worker] = Stealing(RUN, self.transport)

        async def handle(request: Request) -> Reply:
            return await (stealing if request.op in (Op.STEAL, Op.BRING) else databuffer).handle(request)

        self.handlers[worker] = handle
        return databuffer

    def _bench(self, worker: str) -> Bench:
        device = Device(worker)
        roles = {role.name: role for role in self.plan.dag.roles}
        mine = {name: members for name, members in self.plan.placement.items() if worker in members}
        ranks = {name: Rank(members.index(worker), len(members)) for name, members in mine.items()}
        return Bench(
            device=device,
            run_url=self.url,
            run_seed=self.seed,
            resources={name: roles[name].build(device, rank) for name, rank in ranks.items()},
            ranks=ranks,
            all_sum=self._all_sum,
            share=Sharing(worker, self.plan.placement, self._stealings[worker], self._loop, self.stop),
            databuffer=self.databuffers[worker],
            loop=self._loop,
            stop=self.stop,
            meter=lambda name: nullcontext(),
            part=self.part,
            broadcasts=self._broadcasts.get(worker, {}),
        )


class Sum:
    """Adds up what as many threads bring, as often as they like."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self._brought: list[Sequence[float]] = []
        self._lock = threading.Lock()

    def of(self, values: Sequence[float]) -> list[float]:
        with self._lock:
            self._brought.append(values)
        self.barrier.wait()
        total = [fsum(numbers) for numbers in zip(*self._brought, strict=True)]
        if self.barrier.wait() == 0:
            self._brought.clear()
        self.barrier.wait()
        return total


async def _cancel_the_rest() -> None:
    """Requests between workers of a pool that is closed while they wait."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
