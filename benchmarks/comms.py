"""Rows over loopback between two processes: 268 MB of 256 rows in four columns, in another order than they lie in,
as the workers of two hosts hand them over, and the time of a request and its reply.

    python benchmarks/comms.py [--schemes rows+tcp rows+tls rows+unix rows+ucxx] [--row-bytes 262144] [--n 5]

Prints a line of JSON for each scheme: MB/s, CPU seconds of both processes for each GB, and microseconds of a request.
Every row of the first transfer is compared with what it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection

import numpy as np
from distributed.security import Security

from siirl_dask.comms.access import NetworkAccess
from siirl_dask.comms.sockets import Scheme
from siirl_dask.comms.wire import Frame, Pieces
from siirl_dask.coordinator.databuffer.arena import Arena, Bytes
from siirl_dask.coordinator.databuffer.limits import CopyThreads
from siirl_dask.coordinator.databuffer.ragged import CopyPlan
from siirl_dask.coordinator.transport.carriers import (
    CommCarrier,
    HostCarrier,
    NetworkCarrier,
)
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request, TransitionKey
from siirl_dask.tables import Ints
from siirl_dask.worker.peers.data_plane import _keep_freed_memory

_PAYLOAD = 2**28
_COLUMNS = 4
_MESSAGE = 2**24  # bytes of rows in a message
_IN_FLIGHT = 16
_REQUESTS = 1000
_MEMBERS = {"source": "tcp://127.0.0.1:1", "target": "tcp://127.0.0.1:2"}
_SECRET = b"the same in both processes"
_KEY = TransitionKey("benchmark", 0, "train/a->b")


class Rows:
    """Where each row lies at the source and belongs at the target, in bytes."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.count = _PAYLOAD // _COLUMNS // row_bytes
        rng = np.random.default_rng(0)
        self.sources = rng.permutation(self.count) * row_bytes
        self.targets = rng.permutation(self.count) * row_bytes

    def plan(self, starts: Ints, targets: Ints) -> CopyPlan:
        return CopyPlan(starts, targets, np.full(len(starts), self.row_bytes))

    def values(self, column: int) -> Bytes:
        """The first byte of each row, and all others of it: [count]."""
        return ((np.arange(self.count) * 7 + column) % 251).astype(np.uint8)

    def check(self, columns: Sequence[Bytes]) -> None:
        """Raise ValueError unless every byte at the target is the right one."""
        for number, column in enumerate(columns):
            expected = np.empty(self.count, np.uint8)
            expected[self.targets // self.row_bytes] = self.values(number)[
                self.sources // self.row_bytes
            ]
            if (column.reshape(self.count, self.row_bytes) != expected[:, None]).any():
                raise ValueError(f"rows of column {number} are not those that were sent")


def carrier(scheme: Scheme, name: str, handler: Handler, security: Security) -> CommCarrier:
    if scheme is Scheme.UNIX:
        return HostCarrier("benchmark", name, _MEMBERS, handler, timeout=10, secret=_SECRET)
    listens_with = {}
    connects_with = {}
    if scheme is Scheme.TLS:
        listens_with = security.get_listen_args("worker")
        connects_with = security.get_connection_args("worker")
    access = NetworkAccess(
        scheme=scheme, host="127.0.0.1", listens_with=listens_with, connects_with=connects_with
    )
    return NetworkCarrier("benchmark", _MEMBERS, handler, access, timeout=10, secret=_SECRET)


async def serve(scheme: Scheme, rows: Rows, pipe: Connection, security: Security) -> None:
    """Send rows until the pipe says stop; answer "cpu" with the seconds of this process."""
    _keep_freed_memory(_PAYLOAD)
    columns = [np.repeat(rows.values(number), rows.row_bytes) for number in range(_COLUMNS)]
    arena = Arena(keep=_PAYLOAD)

    async def answer(request: Request) -> Reply:
        if request.op == Op.ACK:
            return Reply()
        first, last = request.body["rows"]
        starts = rows.sources[first:last]
        plan = rows.plan(starts, np.arange(len(starts)) * rows.row_bytes)
        frames: list[Frame | Pieces] = []
        for column in columns:
            pieces = plan.source_pieces(column, 1)
            if pieces is None:
                block = arena.allocate(plan.elements)
                plan.copy(column, block.bytes, 1)
                frames.append(memoryview(block.buffer()))
            else:
                frames.append(pieces)
        return Reply({}, frames)

    listener = carrier(scheme, "source", answer, security)
    assert isinstance(listener, HostCarrier | NetworkCarrier)
    pipe.send(await listener.start())
    while True:
        while not pipe.poll():
            await asyncio.sleep(0.01)
        if pipe.recv() == "stop":
            await listener.close()
            return
        pipe.send(time.process_time())


async def nobody(request: Request) -> Reply:
    raise AssertionError("nobody asks the target")


async def measure(
    scheme: Scheme, rows: Rows, pipe: Connection, security: Security, n: int
) -> dict[str, object]:
    _keep_freed_memory(_PAYLOAD)
    asker = carrier(scheme, "target", nobody, security)
    port = pipe.recv()
    if isinstance(asker, NetworkCarrier):
        asker.meet({"source": port})
    columns = [np.zeros(_PAYLOAD // _COLUMNS, np.uint8) for _ in range(_COLUMNS)]
    copy_threads = CopyThreads()
    step = max(1, _MESSAGE // (rows.row_bytes * _COLUMNS))

    async def fetch(first: int) -> None:
        targets = rows.targets[first : first + step]
        plan = rows.plan(np.arange(len(targets)) * rows.row_bytes, targets)

        def places(header: object, sizes: Sequence[int]) -> list[Pieces | None]:
            return [plan.target_pieces(column, 1) for column in columns]

        body = {"rows": [first, first + len(targets)]}
        request = Request(Op.FETCH, _KEY, body, _MESSAGE, places)
        reply = await asker.ask("source", request)
        for column, frame in zip(columns, reply.frames, strict=True):
            if not isinstance(frame, Pieces):
                await copy_threads.run(
                    plan.elements, plan.copy, np.frombuffer(frame, np.uint8), column, 1
                )

    async def transfer() -> None:
        parts = iter(range(0, rows.count, step))

        async def one_after_the_other() -> None:
            for first in parts:
                await fetch(first)

        await asyncio.gather(*(one_after_the_other() for _ in range(_IN_FLIGHT)))

    def cpu() -> float:
        pipe.send("cpu")
        return float(pipe.recv()) + time.process_time()

    await transfer()
    rows.check(columns)
    requests = []
    for _ in range(_REQUESTS):
        began = time.perf_counter()
        # no ping: on one host all pings to a peer are one, which costs a task
        await asker.ask("source", Request(Op.ACK, _KEY))
        requests.append(time.perf_counter() - began)
    seconds = []
    cpu_before = cpu()
    for _ in range(n):
        began = time.perf_counter()
        await transfer()
        seconds.append(time.perf_counter() - began)
    used = cpu() - cpu_before
    await asker.close()
    return {
        "scheme": str(scheme),
        "row_bytes": rows.row_bytes,
        "MBps": round(_PAYLOAD / statistics.median(seconds) / 1e6),
        "cpu_s_per_GB": round(used / (n * _PAYLOAD / 1e9), 2),
        "request_us": round(statistics.median(requests) * 1e6),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = [scheme for scheme in Scheme if scheme is not Scheme.UCXX or find_spec("ucxx")]
    parser.add_argument("--schemes", nargs="+", type=Scheme, default=here, choices=[*Scheme])
    parser.add_argument("--row-bytes", type=int, default=2**18)
    parser.add_argument(
        "--n", type=int, default=5, help="timed transfers, after one that is checked"
    )
    given = parser.parse_args()
    rows = Rows(given.row_bytes)
    security = Security.temporary()
    fork = multiprocessing.get_context("fork")
    for scheme in given.schemes:
        here, there = fork.Pipe()
        source = fork.Process(
            target=lambda scheme, pipe: asyncio.run(serve(scheme, rows, pipe, security)),
            args=(scheme, there),
        )
        source.start()
        try:
            found = asyncio.run(measure(scheme, rows, here, security, given.n))
        finally:
            here.send("stop")
            source.join()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
