"""Bytes of the quickstart's rows by the way they take between workers, and what Dask's fine
performance metrics have of them.

    python benchmarks/transports.py --steps 5

Workers of this machine, by shared memory where that can be, and by messages alone
(``data.transport=dask``). The first number is the run's own, of its trace; the second is the sum of
``bytes`` in Dask's metrics of the workers' tasks, which ``performance_report`` and the dashboard
show.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask
from distributed import Client, LocalCluster

from siirl_dask import run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe.trace.transfers import transfers
from siirl_dask.runs.trace import read_trace
from siirl_dask.tasks.sorting import Task, write_sorting_task
from siirl_dask.trace import SENT, SHARED
from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes

LAYOUTS = {
    "the quickstart's: two workers generate, two learn": (
        4,
        "{rollout: [0, 1], reward: [0, 1], policy: [2, 3]}",
    ),
    "two workers do both": (2, "{}"),
}
"""Number of workers and placement of each."""
HEARTBEAT = 2.0  # seconds: workers send Dask's metrics with it


def in_dasks_metrics(dask_scheduler: Any) -> int:
    """Return the bytes that tasks of runs have reported."""
    found = dask_scheduler.cumulative_worker_metrics.items()
    return int(sum(value for key, value in found if key[0] == "execute" and key[-1] == "bytes"))


def measure(
    task: Task, url: Path, *, workers: int, placement: str, transport: str, steps: int
) -> str:
    """Train, and return a row of the table."""
    settings = {"distributed.worker.multiprocessing-method": START_METHOD}
    prepare_processes()
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        overrides = [
            f"run.url={url}",
            f"run.steps={steps}",
            f"cluster.workers={workers}",
            f"cluster.placement={placement}",
            f"data.transport={transport}",
            f"data.url={task.train}",
            "data.prepare=null",
            f"model.path={task.model}",
            "rollout.engine=transformers",
            "validation.url=null",
            "validation.test_url=null",
            "observe.progress=false",
            "observe.plot=false",
        ]
        file = load_config_file(shipped("quickstart.yaml"), overrides)
        dag, validation = dags(file)
        run(file.config, dag, validation, client=client)
        time.sleep(HEARTBEAT)
        reported: int = client.run_on_scheduler(in_dasks_metrics)
    ways: Counter[str] = Counter()
    for counted in transfers(read_trace(str(url)).spans).ways.values():
        ways.update(counted)
    total = ways.total()
    return (
        f"| {transport} | {ways[SHARED] / steps:,.0f} | {ways[SENT] / steps:,.0f} | "
        f"{ways[SHARED] / total:.1%} | {reported / total:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    steps: int = parser.parse_args().steps
    hide()
    print(
        "| layout | `data.transport` | bytes a step by shared memory | by messages "
        "| share of shared memory | share in Dask's metrics |"
    )
    print("|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        task = write_sorting_task(Path(folder) / "task", accuracy=0.0)
        for name, (workers, placement) in LAYOUTS.items():
            for transport in ("auto", "dask"):
                row = measure(
                    task,
                    Path(folder) / f"{transport}-{workers}",
                    workers=workers,
                    placement=placement,
                    transport=transport,
                    steps=steps,
                )
                print(f"| {name} {row}", flush=True)


if __name__ == "__main__":
    main()
