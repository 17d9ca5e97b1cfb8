"""Measures what a step costs Dask's scheduler and the client, from 64 to 1,024 workers.

    python benchmarks/scale/scheduler.py [--workers 64 256 1024] [--steps 8] [--json]

A scheduler in a process of its own, real workers of one thread, a hundred in a process, and the
run's own driver: it registers, submits, listens and merges as in a run. The workers compute nothing
and report 40 metrics a step. What is printed is the mean of the steps after the first ones.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import psutil
from distributed import Client
from rich.console import Console
from rich.table import Table

from idle_worker import IdleWorker
from siirl_dask.driver.clusters import run_on_cluster
from siirl_dask.driver.clusters.processes import members
from siirl_dask.driver.driver import Driver
from siirl_dask.planner import Iteration, Phase
from siirl_dask.worker.peers.data_plane import DataSettings
from siirl_dask.worker.run_spec import RunSpec

_IDLE_WORKER = Path(__file__).with_name("idle_worker.py")
_PER_PROCESS = 128
_WARM_UP = 3  # iterations: those that fill the pipeline
_LOOKAHEAD = 2  # the default of run.lookahead
_PATIENCE = 300.0


@dataclass(frozen=True)
class Cost:
    """Mean cost of one step."""

    workers: int
    seconds: float
    scheduler_cpu: float
    client_cpu: float
    megabytes: float
    """Both ways on all of the scheduler's connections."""


def measure(workers: int, steps: int) -> Cost:
    """Run ``steps`` steps on a cluster of its own."""
    with cluster(workers) as (client, scheduler):
        spec = RunSpec(
            run=f"measured-{workers}",
            url="",
            seed=0,
            members=members(client, workers),
            phases=b"",
            builds_from=Phase.TRAIN,
            threads=1,
            data=DataSettings(peer_timeout=_PATIENCE),  # a busy machine is no failure here
            retry_seconds=0,
        )
        driver = Driver(client, spec, _LOOKAHEAD, _PATIENCE, lambda step: "")
        with patch.object(run_on_cluster, "DAGWorker", IdleWorker):
            driver.start(_PATIENCE)
        done = driver.run(
            Iteration(Phase.TRAIN, step, step) for step in range(1, steps + _WARM_UP + 1)
        )
        for _ in range(_WARM_UP):
            next(done)
        before = Usage.now(scheduler, driver)
        for _ in done:
            pass
        after = Usage.now(scheduler, driver)
        driver.finish(_PATIENCE)
        driver.close()
    return Cost(workers, *((b - a) / steps for a, b in zip(before, after, strict=True)))


class Usage(tuple[float, ...]):
    """Seconds, CPU seconds of the scheduler and of this process, and megabytes so far."""

    @staticmethod
    def now(scheduler: psutil.Process, driver: Driver) -> Usage:
        used = (sum(process.cpu_times()[:2]) for process in (scheduler, psutil.Process()))
        return Usage((time.perf_counter(), *used, (driver.traffic() or 0) / 1e6))


@contextmanager
def cluster(workers: int) -> Iterator[tuple[Client, psutil.Process]]:
    """Start a scheduler and workers, and give a client and the scheduler's process."""
    with ExitStack() as undo:
        where = Path(undo.enter_context(TemporaryDirectory())) / "scheduler.json"
        options = (
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(where),
        )
        scheduler = _start(undo, "-m", "dask", "scheduler", *options)
        client = undo.enter_context(Client(scheduler_file=str(where), timeout=_PATIENCE))
        address = client.scheduler_info(n_workers=0)["address"]
        firsts = range(0, workers, _PER_PROCESS)
        started = [
            _start(undo, _IDLE_WORKER, address, first, min(first + _PER_PROCESS, workers))
            for first in firsts
        ]
        client.wait_for_workers(workers, timeout=_PATIENCE)
        assert all(process.poll() is None for process in started)
        yield client, psutil.Process(scheduler.pid)


def _start(undo: ExitStack, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a Python process that is killed on the way out."""
    process = subprocess.Popen([sys.executable, *map(str, arguments)], stderr=subprocess.DEVNULL)
    undo.callback(process.wait)
    undo.callback(process.kill)
    return process


def table(costs: Sequence[Cost]) -> Table:
    """Return the costs as a table."""
    shown = Table(
        "workers", "s a step", "scheduler CPU s", "client CPU s", "MB through the scheduler"
    )
    for cost in costs:
        numbers = (cost.seconds, cost.scheduler_cpu, cost.client_cpu, cost.megabytes)
        shown.add_row(f"{cost.workers:,}", *(f"{number:.2f}" for number in numbers))
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of workers and print the costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per number of workers"
    )
    options = parser.parse_args(arguments)
    # or it would leave its processes behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    costs = [measure(workers, options.steps) for workers in options.workers]
    if options.json:
        for cost in costs:
            print(json.dumps(asdict(cost)))
    else:
        Console().print(table(costs))


if __name__ == "__main__":
    main()
