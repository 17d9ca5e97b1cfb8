"""The trace of a run costs time: that of the quickstart's steps with it and without, in turns
within one run.

    python benchmarks/trace_overhead.py [--steps 240] [--block 6] [--folder FOLDER]
    python benchmarks/trace_overhead.py --replay RUN

Blocks of steps are recorded and not recorded by turns, on all workers alike. Runs differ from one
another by more than the trace costs; neighbouring blocks of one run do not. The first step of each
block is left out: while it goes on, the last part of the block before may still be written. Beside
the seconds of a step it tells those of the workers' cores, on which other load on the machine has
little influence.

The difference is small, and drowns where the machine has other work. So the trace of a run is also
done again on its
own: what a worker recorded of a step is recorded, made into a part and written to a disk, many
times, and the processor time of that is compared with the run's steps. Recording that is off is
timed in the same way.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

from siirl_storage import stage_part

from dask_cluster import DaskCluster
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.observe.trace.bottleneck import find_bottleneck
from siirl_dask.observe.trace.trace_table import TraceSpan, trace_table
from siirl_dask.planner import Iteration
from siirl_dask.runs.trace import read_trace
from siirl_dask.trace import START, Recorder
from siirl_dask.worker.monitoring.tracing import Tracing

WORKERS = 4


def record_in_turns(block: int) -> None:
    """Have this process record every other block of steps."""
    begin, cores = Tracing.begin, dict[int, float]()

    def begin_in_turns(self: Tracing, iteration: Iteration) -> None:
        cores[iteration.step] = time.process_time()
        self.recorder.enabled = is_recorded((iteration.step - 1) // block)
        begin(self, iteration)

    setattr(Tracing, "begin", begin_in_turns)  # noqa: B010  # mypy refuses to assign a method
    setattr(Tracing, "cores", cores)  # noqa: B010


def is_recorded(block: int) -> bool:
    """Return whether a block is recorded. Every other pair begins with one that is not, so that
    no trend matters.
    """
    return block % 4 in (0, 3)


def cores_so_far() -> dict[int, float]:
    """Return the seconds of cores that this process had taken when it began each step."""
    cores: dict[int, float] = getattr(Tracing, "cores", {})
    return cores


def compare(seconds: dict[int, float], block: int) -> tuple[list[float], list[float]]:
    """Return the median seconds of a step of each recorded block, and of its neighbour that is
    not.
    """
    blocks: dict[int, list[float]] = {}
    for step, taken in sorted(seconds.items()):
        if (step - 1) % block:
            blocks.setdefault((step - 1) // block, []).append(taken)
    pairs = [
        (at, at + 1) if is_recorded(at) else (at + 1, at) for at in range(0, len(blocks) - 1, 2)
    ]
    return [median(blocks[on]) for on, _ in pairs], [median(blocks[off]) for _, off in pairs]


def tell(what: str, seconds: dict[int, float], block: int) -> None:
    """Print what a step takes with the trace and without, and the difference."""
    on, off = compare(seconds, block)
    differences = [with_it - without for with_it, without in zip(on, off, strict=True)]
    error = stdev(differences) / len(differences) ** 0.5
    print(
        f"{what}: {mean(off) * 1e3:.1f} ms a step without the trace, {mean(on) * 1e3:.1f} ms with "
        f"it: {mean(differences) / mean(off):+.2%}, standard error {error / mean(off):.2%}, "
        f"{len(on)} pairs of blocks"
    )


def replay(url: str, most: int = 100) -> None:
    """Print what it takes to record and write the trace of a worker's step, for some steps of
    the run at ``url``.
    """
    spans = read_trace(url).spans
    steps = defaultdict[tuple[int, str], list[TraceSpan]](list)
    for span in spans:
        if span.phase != START:
            steps[span.step, span.worker].append(span)
    chosen = list(steps.values())[-most:]
    with TemporaryDirectory() as folder:
        on, off = ([_again(own, enabled, folder) for own in chosen] for enabled in (True, False))
    wall = mean(max(one.end for one in own) - min(one.start for one in own) for own in chosen) / 1e9
    for name, costs in (("on", on), ("off", off)):
        error = 1.96 * stdev(costs) / len(costs) ** 0.5
        print(
            f"trace {name}: {mean(costs) * 1e3:.3f} ms of a core a step and worker, +- "
            f"{error * 1e3:.3f} (95 %), "
            f"{mean(costs) / wall:.3%} of the {wall * 1e3:.0f} ms of a step"
        )
    print(f"{mean(map(len, chosen)):.0f} rows a step and worker, {len(chosen)} of these")


def _again(spans: Sequence[TraceSpan], enabled: bool, folder: str, times: int = 5) -> float:
    """Return the processor seconds of recording the spans, and writing them if that is ``enabled``:
    the median of some times.
    """
    costs = list[float]()
    for _ in range(times):
        began, recorder = time.process_time(), Recorder(enabled=enabled)
        for one in spans:
            if one.is_count:
                recorder.count(one.lane, one.name, one.amount or 0)
            else:
                with recorder.span(one.lane, one.what, one.name) as span:
                    span.amount = one.amount
        if enabled:
            stage_part(folder, 1, 0, trace_table(recorder.drain(), one.worker, "clock", 0))
        costs.append(time.process_time() - began)
    return median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--block", type=int, default=6)
    parser.add_argument(
        "--replay", metavar="RUN", help="do the trace of this run again, and nothing else"
    )
    parser.add_argument(
        "--folder", help="where the task is made, if it is not there, and the run stays"
    )
    chosen = parser.parse_args()
    if chosen.replay:
        return replay(chosen.replay)
    with TemporaryDirectory() as new, closing(DaskCluster(WORKERS)) as cluster:
        folder = chosen.folder or new
        cluster.client.run(record_in_turns, chosen.block)
        given = [
            f"run.url={folder}/run",
            f"data.url={folder}/sorting/train.parquet",
            f"run.steps={chosen.steps}",
        ]
        given += [
            f"model.path={folder}/sorting/model",
            f"cluster.address={cluster.client.scheduler.address}",
        ]
        given += [
            "validation.url=null",
            "validation.test_url=null",
            "checkpoint.every=0",
            "observe.progress=false",
        ]
        file = load_config_file(shipped("quickstart.yaml"), given)
        run(file.config, *dags(file), fresh=True)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        seconds = {line["step"]: line["seconds"] for line in lines}
        workers = cluster.client.run(cores_so_far).values()
        trace = read_trace(f"{folder}/run", range(2, chosen.steps))
        rows = len(trace.spans) / len(trace.steps) / WORKERS
        files = [path.stat().st_size for path in Path(folder, "run", "trace").rglob("*.parquet")]
        worst = min(worker.explained for worker in find_bottleneck(trace.spans).workers)
        replay(f"{folder}/run")
    print(
        f"{platform.machine()}, {WORKERS} workers, {chosen.steps} steps in blocks of {chosen.block}"
    )
    tell("seconds", seconds, chosen.block)
    taken = {
        step: sum(one[step + 1] - one[step] for one in workers) for step in range(1, chosen.steps)
    }
    tell("cores, all workers", taken, chosen.block)
    print(
        f"{rows:.0f} rows and {mean(files) / 1e3:.1f} kB a step and worker; the lanes explain "
        f"{worst:.1%} at least"
    )
    return None


if __name__ == "__main__":
    main()
