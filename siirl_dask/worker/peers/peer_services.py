"""All that answers a worker's peers in a run: its databuffer, its store of process groups, its work
queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from siirl_dask.coordinator import Dataset
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.coordinator.transport.peers import PeerTransport
from siirl_dask.planner import Plan
from siirl_dask.trace import Recorder
from siirl_dask.worker.groups.joined_groups import GroupStore
from siirl_dask.worker.peers.data_plane import DataPlane
from siirl_dask.worker.peers.work_stealing import ExpectedWork, StealableQueues, StealService
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.stop import StopFlag

if TYPE_CHECKING:
    from distributed import Worker


class PeerServices:
    """Serves one worker's peers on the Dask worker's event loop: ``meet``, ``begin`` and
    ``watch_next`` are called there.
    """

    def __init__(
        self,
        worker: Worker,
        spec: RunSpec,
        phases: Mapping[str, tuple[Plan, Dataset]],
        trace: Recorder,
    ) -> None:
        """``phases`` are the run's plans and datasets by name."""
        plans = {name: plan for name, (plan, _) in phases.items()}
        edges = {}
        nodes: set[str] = set()
        for name, plan in plans.items():
            edges.update({f"{name}/{edge.name}": edge for edge in plan.edges})
            nodes.update(f"{name}/{node.name}" for node in plan.dag.nodes)
        self._run = spec.run
        self._members = list(spec.members)
        self._shares_work = spec.data.stealing
        self._name = str(worker.name)
        self._loop = asyncio.get_running_loop()
        self.store = GroupStore(spec.run, self._name, spec.members, self._loop)
        self._plane = DataPlane(
            worker=worker,
            run=spec.run,
            members=spec.members,
            edges=edges,
            settings=spec.data,
            hosts=plans[spec.builds_from].hosts,
            trace=trace,
            secret=spec.secret,
        )
        self._stealing = StealService(
            spec.run, self._plane.transport, ExpectedWork(self._plane.window, nodes)
        )

    @property
    def databuffer(self) -> Databuffer:
        return self._plane.databuffer

    @property
    def transport(self) -> PeerTransport:
        return self._plane.transport

    @property
    def port(self) -> int:
        """Port where peers reach this worker, once the services have started."""
        return self._plane.port

    def share_work(
        self, placement: Mapping[str, Sequence[str]], stop: StopFlag
    ) -> StealableQueues | None:
        """Return what offers a node's work items to idle peers; None where work stealing is off.

        ``placement`` has the workers of each role.
        """
        if not self._shares_work:
            return None
        return StealableQueues(self._name, placement, self._stealing, self._loop, stop)

    def pending_replies(self) -> list[list[object]]:
        """Return each reply that is pending: the peer, what it is asked for, and for how many
        seconds.
        """
        return [list(reply) for reply in self._plane.transport.pending_replies()]

    def check(self) -> None:
        """Raise ConfigError if this machine lacks a folder that the settings name."""
        self._plane.check()

    async def start(self) -> None:
        """Begin to answer peers."""
        await self._plane.start(self._handle)

    def meet(self, ports: Mapping[str, int]) -> None:
        """Set the port of every member's listener; requests to peers are possible from then on."""
        self._plane.meet(ports)

    def begin(self, sequence: int, needed: int, completed: int) -> None:
        """Begin the iteration ``sequence``: forget the rows of those before sequence number
        ``needed``, and the shared work of those before ``completed``.
        """
        self._plane.begin(sequence, needed)
        self._stealing.forget(completed)

    def watch_next(self, on_silence: Callable[[str], None]) -> None:
        """Watch the next worker: a stalled one is noticed even while all others wait in a
        collective.
        """
        place = self._members.index(self._name)
        next_worker = self._members[(place + 1) % len(self._members)]
        if next_worker != self._name:
            self._plane.transport.watch(next_worker, on_silence)

    def abort(self, reason: str) -> None:
        """Wake every wait for rows and for shared work, now and later, with Aborted."""
        self._plane.databuffer.abort(reason)
        self._stealing.abort(reason)

    async def close(self) -> None:
        """Stop answering peers and free all rows."""
        await self._plane.close()

    async def _handle(self, request: Request) -> Reply:
        if request.op == Op.STORE and request.key.run == self._run:
            return await self.store.answer()
        if request.op in (Op.STEAL, Op.RETURN):
            return await self._stealing.handle(request)
        return await self._plane.databuffer.handle(request)
