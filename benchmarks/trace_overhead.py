"""The trace of a run costs time: seconds of the quickstart's steps with it and without, in turns within one run.

    python benchmarks/trace_overhead.py [--steps 240] [--block 6] [--folder FOLDER]

Blocks of steps are recorded and not recorded by turns, on all workers alike. Runs differ from one another by more than
the trace costs; neighbouring blocks of one run do not. The first step of each block is left out: while it goes on, the
last part of the block before may still be written.
"""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import closing
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

from dask_cluster import DaskCluster
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.observe.bottleneck import find_bottleneck
from siirl_dask.planner import Iteration
from siirl_dask.runs.trace import read_trace
from siirl_dask.worker.tracing import Tracing

WORKERS = 4


def record_in_turns(block: int) -> None:
    """Have this process record every other block of steps."""
    begin = Tracing.begin

    def begin_in_turns(self: Tracing, iteration: Iteration) -> None:
        self.recorder.enabled = (iteration.step - 1) // block % 2 == 0
        begin(self, iteration)

    setattr(Tracing, "begin", begin_in_turns)  # noqa: B010  # mypy refuses to assign a method


def compare(seconds: dict[int, float], block: int) -> tuple[list[float], list[float]]:
    """Return the mean seconds of a step of each recorded block, and of the block after it."""
    blocks: dict[int, list[float]] = {}
    for step, taken in sorted(seconds.items()):
        if (step - 1) % block:
            blocks.setdefault((step - 1) // block, []).append(taken)
    pairs = [(blocks[at], blocks[at + 1]) for at in range(0, len(blocks) - 1, 2)]
    return [median(on) for on, _ in pairs], [median(off) for _, off in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--block", type=int, default=6)
    parser.add_argument("--folder", help="where the task is made, if it is not there, and the run stays")
    chosen = parser.parse_args()
    with TemporaryDirectory() as new, closing(DaskCluster(WORKERS)) as cluster:
        folder = chosen.folder or new
        cluster.client.run(record_in_turns, chosen.block)
        given = [f"run.url={folder}/run", f"data.url={folder}/sorting/train.parquet", f"run.steps={chosen.steps}"]
        given += [f"model.path={folder}/sorting/model", f"cluster.address={cluster.client.scheduler.address}"]
        given += ["validation.url=null", "validation.test_url=null", "checkpoint.every=0", "observe.progress=false"]
        file = load_config_file(shipped("quickstart.yaml"), given)
        run(file.config, *dags(file), fresh=True)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        on, off = compare({line["step"]: line["seconds"] for line in lines}, chosen.block)
        trace = read_trace(f"{folder}/run", range(2, chosen.steps))
        rows = len(trace.spans) / len(trace.steps) / WORKERS
        files = [path.stat().st_size for path in Path(folder, "run", "trace").rglob("*.parquet")]
        worst = min(worker.explained for worker in find_bottleneck(trace.spans).workers)
    differences = [with_it - without for with_it, without in zip(on, off, strict=True)]
    error = stdev(differences) / len(differences) ** 0.5
    print(f"{platform.machine()}, {WORKERS} workers, {len(on)} pairs of blocks of {chosen.block} steps")
    print(f"a step takes {mean(off) * 1e3:.1f} ms without the trace, {mean(on) * 1e3:.1f} ms with it")
    print(f"difference {mean(differences) / mean(off):.2%}, standard error {error / mean(off):.2%}")
    print(f"{rows:.0f} rows and {mean(files) / 1e3:.1f} kB a step and worker; the lanes explain {worst:.1%} at least")


if __name__ == "__main__":
    main()
