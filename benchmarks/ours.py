"""This project's data plane on the same work: the only file here that knows its interface.

Rows are grouped by ``uid % destinations``. A GROUPED edge keeps a group together and gives each of
as many groups as there are owners to another owner, so that every destination gets one residue
class, as the work demands; which one is the layout's decision. The driver says "go" to every worker
and hears "done" over sockets of their own: in a run nobody calls anybody, since a worker's chain
goes on to its next link by itself.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
from distributed import Worker, WorkerPlugin, get_worker
from distributed.comm.addressing import get_address_host

from dask_cluster import DaskCluster, wait_for
from method import PATIENCE
from siirl_dask.comms.proofs import new_secret
from siirl_dask.config import TransportMode
from siirl_dask.planner import Edge, Iteration, Rows
from siirl_dask.schema import GROUP_ID, ROW_ID, TOKENS
from siirl_dask.worker.peers.data_plane import DataPlane, DataSettings
from work import COLUMNS, Held, Work, inspect, make_rows, offsets_of, touch
from work import Rows as WorkRows

_PHASE = "train"
_LISTS = {name: pa.list_(pa.from_numpy_dtype(kind)) for name, kind in COLUMNS.items()}
_SCHEMA = pa.schema({ROW_ID: pa.int64(), GROUP_ID: pa.int64(), TOKENS: pa.int64()} | _LISTS)
_SEQUENCE = struct.Struct("<q")
_DONE = b"."
_T = TypeVar("_T")


def _edge(work: Work, workers: Sequence[str]) -> Edge:
    return Edge(
        source="rollout",
        target="update",
        sources=tuple(workers[: work.sources]),
        targets=tuple(workers[work.targets]),
        rows=Rows.GROUPED,
        by_minibatch=False,
        schema=_SCHEMA,
        guide="rollout",
    )


def _make_table(work: Work, source: int) -> pa.Table:
    rows = make_rows(work, source)
    offsets = pa.array(rows.offsets, pa.int32())
    lists = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in rows.arrays]
    columns = [rows.uids, rows.uids % work.destinations, np.diff(rows.offsets)]
    return pa.table([*map(pa.array, columns), *lists], schema=_SCHEMA)


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU and bytes of a worker since it started."""

    cpu: float = 0.0
    """Seconds of CPU of its process, user and system."""
    received: int = 0
    """Bytes of rows from other workers."""
    between_hosts: int = 0
    """Bytes of rows from workers of other hosts."""

    def __add__(self, other: Usage) -> Usage:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Usage(*(one + another for one, another in pairs))

    def __sub__(self, other: Usage) -> Usage:
        return self + Usage(-other.cpu, -other.received, -other.between_hosts)


class Plane(WorkerPlugin):
    """On every worker: its data plane, its rows when it is a source, and what it received."""

    def __init__(self, run: str, work: Work, members: Mapping[str, str], transport: str) -> None:
        self.name = f"benchmark-{run}"
        self._run = run
        self._work = work
        self._members = dict(members)
        self._secret = new_secret()
        self._transport = transport

    async def setup(self, worker: Worker) -> None:
        self._edge = _edge(self._work, list(self._members))
        self._worker_name = str(worker.name)
        self._loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
        self._received: pa.Table | None = None
        if self._worker_name in self._edge.sources:
            self._table = _make_table(self._work, self._edge.sources.index(self._worker_name))
        edges, settings = (
            {f"{_PHASE}/{self._edge.name}": self._edge},
            DataSettings(transport=TransportMode(self._transport)),
        )
        hosts = {name: get_address_host(address) for name, address in self._members.items()}
        if self._worker_name not in hosts:
            return
        self._plane = DataPlane(
            worker, self._run, self._members, edges, settings, hosts, secret=self._secret
        )
        await self._plane.start()
        self.port = self._plane.port
        self._server = await asyncio.start_server(self._serve, hosts[self._worker_name])
        self.listens_at: tuple[str, int] = self._server.sockets[0].getsockname()[:2]

    async def teardown(self, worker: Worker) -> None:
        self._received = None
        if self._worker_name in self._members:
            self._server.close()
            await self._plane.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while word := await reader.read(_SEQUENCE.size):
            await self.transfer(*_SEQUENCE.unpack(word))
            writer.write(_DONE)
        writer.close()

    async def transfer(self, sequence: int) -> None:
        """Do what a chain does at the edge, Send and then Recv, and touch the rows that came."""
        databuffer, edge, iteration = (
            self._plane.databuffer,
            self._edge,
            Iteration(_PHASE, sequence, sequence),
        )
        if self._worker_name in edge.sources:
            await databuffer.publish(edge, iteration, self._table)
        if self._worker_name in edge.targets:
            self._received = await databuffer.pull(edge, edge, iteration)
            touch(
                chunk.flatten().to_numpy()
                for name in COLUMNS
                for chunk in self._received[name].chunks
            )

    def meet(self, ports: Mapping[str, int]) -> None:
        self._loop.call_soon_threadsafe(self._plane.meet, ports)

    def usage(self) -> Usage:
        traffic = self._plane.databuffer.traffic
        return Usage(time.process_time(), traffic.total, traffic.between_hosts)

    def check(self) -> Held:
        assert self._received is not None
        table = self._received.combine_chunks()
        values = {name: table[name].chunk(0).flatten().to_numpy() for name in COLUMNS}
        return inspect(
            WorkRows(table[ROW_ID].to_numpy(), offsets_of(table[TOKENS].to_numpy()), values)
        )

    def drop(self, before: int) -> None:
        self._received = None
        self._wait(self._forget(before))

    async def _forget(self, before: int) -> None:
        self._plane.databuffer.forget(before)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)


def _plane(name: str) -> Plane:
    plugin = get_worker().plugins[name]
    assert isinstance(plugin, Plane)
    return plugin


def _listens_at(plugin: str) -> tuple[str, int]:
    return _plane(plugin).listens_at


def _port(plugin: str) -> int:
    return _plane(plugin).port


def _meet(plugin: str, ports: Mapping[str, int]) -> None:
    _plane(plugin).meet(ports)


def _usage(plugin: str) -> Usage:
    return _plane(plugin).usage()


def _check(plugin: str) -> Held:
    return _plane(plugin).check()


def _drop(plugin: str, before: int) -> None:
    _plane(plugin).drop(before)


class Transitions:
    """The transition over one way of transport."""

    def __init__(self, name: str, plugin: str, work: Work, cluster: DaskCluster) -> None:
        self.name = name
        self._plugin = plugin
        self._cluster = cluster
        self._destinations = cluster.addresses[work.targets]
        self._sequence = 0
        self._ask(_meet, None, dict(zip(cluster.members, self._ask(_port), strict=True)))
        self._links = [
            socket.create_connection(place, PATIENCE) for place in self._ask(_listens_at)
        ]

    def usage(self) -> Usage:
        """Return what all workers together have used since they started."""
        return sum(self._ask(_usage), Usage())

    def before(self) -> None:
        self._sequence += 1
        self._bytes_before = self._cluster.traffic()

    def run(self) -> None:
        for link in self._links:
            link.sendall(_SEQUENCE.pack(self._sequence))
        for link in self._links:
            if link.recv(1) != _DONE:
                raise RuntimeError("a worker failed: see its log")

    def check(self) -> list[Held]:
        return self._ask(_check, self._destinations)

    def driver_bytes(self) -> int:
        words = (_SEQUENCE.size + len(_DONE)) * len(self._links)
        return self._cluster.traffic() - self._bytes_before + words

    def after(self) -> None:
        client, addresses, before = (
            self._cluster.client,
            self._cluster.addresses,
            self._sequence + 1,
        )
        wait_for(
            [client.submit(_drop, self._plugin, before, workers=[a], pure=False) for a in addresses]
        )

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _ask(
        self, question: Callable[..., _T], addresses: Sequence[str] | None = None, *given: object
    ) -> list[_T]:
        """Return the answers of all workers, or of some."""
        client, asked = (
            self._cluster.client,
            self._cluster.addresses if addresses is None else addresses,
        )
        futures = [
            client.submit(question, self._plugin, *given, workers=[address], pure=False)
            for address in asked
        ]
        answers: list[_T] = client.gather(futures)
        return answers


def _start_plane(cluster: DaskCluster, work: Work, transport: str) -> Transitions:
    plane = Plane(uuid4().hex[:8], work, cluster.members, transport)
    cluster.client.register_plugin(plane)
    return Transitions(f"siirl_dask_{transport}", plane.name, work, cluster)


class Ours:
    """One cluster, and on it a data plane for each way of transport. ``address`` is that of a
    cluster that is there.
    """

    def __init__(self, transports: Sequence[str], address: str = "") -> None:
        self._transports = transports
        self._address = address
        self._cluster: DaskCluster | None = None
        self._methods: list[Transitions] = []

    def start(self, work: Work) -> Sequence[Transitions]:
        self._cluster = DaskCluster(work.workers, self._address)
        self._methods = [
            _start_plane(self._cluster, work, transport) for transport in self._transports
        ]
        return self._methods

    def close(self) -> None:
        for method in self._methods:
            method.close()
        if self._cluster is not None:
            self._cluster.close()
