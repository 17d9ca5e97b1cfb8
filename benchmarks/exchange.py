"""Measures the cost of gathering the row statistics of an edge, from 4 to 1,024 workers.

    python benchmarks/exchange.py [--workers 4 16 64 256 1024] [--rows 64] [--out docs/benchmarks/exchange.md]

All workers live in this process and talk over function calls that copy what they carry, so the time measured is the
CPU time of all of them together, one after the other. What a cluster would take is modelled from it: workers of one
level of the tree work at the same time, a member serves its children one after the other, and every message takes the
latency given.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from siirl_dask.coordinator.databuffer.shares import FAN_OUT, GatheredStatistics, StatisticsTree
from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners, row_statistics
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request, TransitionKey
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import GROUP_ID, ROW_ID, TOKENS, make_schema

SCHEMA = make_schema({name: pa.int64() for name in (ROW_ID, GROUP_ID, TOKENS)})


@dataclass
class CountingTransport:
    """Calls the other worker's handler, copies its answer, and counts."""

    handlers: dict[str, Handler] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    largest: int = 0

    async def request(self, worker: str, request: Request) -> Reply:
        reply = await self.handlers[worker](request)
        self.messages += 1
        self.largest = max(self.largest, reply.nbytes)
        self.served[worker] += reply.nbytes
        return Reply(reply.header, [bytes(frame) for frame in reply.frames])


@dataclass(frozen=True)
class Measured:
    workers: int
    rows: int
    messages: int
    statistics: int
    """Bytes of the whole."""
    most_served: int
    """Bytes that the busiest worker sends."""
    serial: float
    """Seconds of CPU of all workers together."""
    decide: float
    """Seconds for one worker to decide where every row goes."""

    def modelled(self, latency: float, bandwidth: float) -> float:
        """Seconds on a cluster: up and down the tree, each level after the other."""
        levels = depth(self.workers)
        per_message = self.serial / max(1, self.messages)
        children = min(FAN_OUT, self.workers - 1)
        level = latency + children * (per_message + self.statistics / bandwidth)
        return 2 * levels * level + self.decide


def depth(workers: int) -> int:
    """Levels of the tree below its root."""
    levels, last = 0, workers - 1
    while last > 0:
        last, levels = (last - 1) // FAN_OUT, levels + 1
    return levels


def measure(workers: int, rows_each: int) -> Measured:
    names = tuple(map(str, range(workers)))
    edge = Edge("rollout", "update", names, names, Rows.BALANCED, False, SCHEMA, "rollout")
    key = TransitionKey("benchmark", 0, edge.name)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(8, 1, workers * rows_each), 131072).astype(np.int64) + 1
    ids = np.arange(workers * rows_each)
    whole = pa.table({ROW_ID: ids, GROUP_ID: ids // 16, TOKENS: lengths})
    parts = [row_statistics(whole.slice(i * rows_each, rows_each), i) for i in range(workers)]
    transport = CountingTransport()

    async def gather() -> tuple[float, GatheredStatistics]:
        trees = [
            _join_tree(transport, edge, name, part) for name, part in zip(names, parts, strict=True)
        ]
        began = time.process_time()
        done = await asyncio.gather(*(tree.gather(edge, key) for tree in trees))
        return time.process_time() - began, done[-1]

    gc.collect()
    serial, gathered = asyncio.run(gather())
    began = time.perf_counter()
    owners = assign_owners(edge, EdgeStatistics.from_rows(gathered.statistics))
    decide = time.perf_counter() - began
    assert len(gathered.statistics) == len(owners) == len(ids)
    most = max(transport.served.values(), default=0)
    return Measured(
        workers, len(ids), transport.messages, gathered.statistics.nbytes, most, serial, decide
    )


def _join_tree(
    transport: CountingTransport, edge: Edge, name: str, part: pa.Table
) -> StatisticsTree:
    async def own(key: TransitionKey) -> GatheredStatistics:
        return GatheredStatistics(part)

    tree = StatisticsTree(name, transport, own)

    async def answer(request: Request) -> Reply:
        assert request.op in (Op.SUBTREE_STATISTICS, Op.ALL_STATISTICS)
        return await tree.answer(edge, request)

    transport.handlers[name] = answer
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--rows", type=int, default=64, help="rows of each worker")
    parser.add_argument(
        "--latency", type=float, default=1e-3, help="seconds of a message between two workers"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=1e9, help="bytes per second of one worker"
    )
    parser.add_argument("--out", type=Path, help="a Markdown file to write the table to")
    given = parser.parse_args()
    measure(4, given.rows)  # what is done once is not counted
    found = [measure(workers, given.rows) for workers in given.workers]
    header = ["workers", "rows", "levels", "messages", "statistics", "busiest sends", "CPU, all workers",
              "CPU, each", "deciding", "modelled on a cluster"]  # fmt: skip
    lines = [
        [
            f"{m.workers:,}",
            f"{m.rows:,}",
            str(depth(m.workers)),
            f"{m.messages:,}",
            f"{m.statistics / 1e3:,.0f} kB",
            f"{m.most_served / 1e6:,.2f} MB",
            f"{m.serial * 1e3:,.0f} ms",
            f"{m.serial / m.workers * 1e3:,.1f} ms",
            f"{m.decide * 1e3:,.0f} ms",
            f"{m.modelled(given.latency, given.bandwidth) * 1e3:,.0f} ms",
        ]
        for m in found
    ]
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(_markdown(header, lines, given))


def _markdown(header: list[str], lines: list[list[str]], given: argparse.Namespace) -> str:
    rows = [header, ["---:"] * len(header), *lines]
    return "\n".join(
        [
            "# The exchange of row statistics",
            "",
            f"{given.rows} rows of log-normal lengths on each worker, everyone learns all of them "
            f"over a tree of fan-out {FAN_OUT} and decides where each row goes, balanced by "
            f"tokens. Measured with all workers in one process ({platform.machine()}, Python "
            f"{platform.python_version()}); the last column is a model for a cluster with "
            f"{given.latency * 1e3:g} ms a message and {given.bandwidth / 1e9:g} GB/s a worker, "
            "not a measurement.",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            f"Repeat it: `python benchmarks/exchange.py --rows {given.rows}`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
