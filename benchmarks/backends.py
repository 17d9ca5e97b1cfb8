"""Compares a step with the model in shards (``trainer.backend=fsdp``) to one with the whole model
on every worker.

    python benchmarks/backends.py [--learners 2] [--pairs 6] [--steps 15] [--out FILE]

The quickstart on one cluster of four processes, a run of each backend in turns: whatever else the
machine does meets both alike.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from distributed import LocalCluster
from rich.console import Console

from siirl_dask.config import Backend
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.observe import read_metrics

_WARM = 3  # steps of a run that are not counted
_PLACES = {
    2: "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}",
    4: "cluster.placement={}",
}
_NODES = ("rollout", "old_logprobs", "update", "weights")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=int, choices=sorted(_PLACES), default=2)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    seconds: dict[Backend, list[list[dict[str, float]]]] = {backend: [] for backend in Backend}
    with (
        TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=4, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0"
        ) as cluster,
    ):
        for pair in range(given.pairs):
            for backend in list(Backend)[:: -1 if pair % 2 else 1]:
                url = str(Path(folder, f"{backend}-{pair}"))
                fixed = [
                    f"run.url={url}",
                    f"cluster.address={cluster.scheduler_address}",
                    _PLACES[given.learners],
                ]
                seconds[backend].append(
                    measure(folder, [*fixed, f"trainer.backend={backend}"], given.steps)
                )
    text = report(seconds, given.learners, given.steps)
    Console().print(text)
    if given.out:
        given.out.write_text(text)


def measure(folder: str, overrides: Sequence[str], steps: int) -> list[dict[str, float]]:
    """Return, for each step, the seconds of the slowest worker in total (``step``) and by node."""
    values = [
        *overrides,
        f"run.steps={steps + _WARM}",
        f"data.url={folder}/task/train.parquet",
        f"model.path={folder}/task/model",
        "rollout.engine=transformers",
        "validation.url=null",
        "validation.test_url=null",
        "checkpoint.every=0",
        "observe.progress=false",
    ]
    file = load_config_file(shipped("quickstart.yaml"), values)
    dag, _ = dags(file)
    run(file.config, dag)
    records = read_metrics(file.config.run.url)[_WARM:]
    return [
        {
            "step": record["seconds"],
            **{name: record["metrics"][f"seconds/{name}"] or 0.0 for name in _NODES},
        }
        for record in records
    ]


def report(seconds: dict[Backend, list[list[dict[str, float]]]], learners: int, steps: int) -> str:
    def of(runs: Sequence[Sequence[dict[str, float]]], name: str) -> float:
        return median(step[name] for run in runs for step in run)

    torch, fsdp = seconds[Backend.torch], seconds[Backend.fsdp]
    more = sorted(of([b], "step") / of([a], "step") - 1 for a, b in zip(torch, fsdp, strict=True))
    lines = [
        f"`python benchmarks/backends.py` on {platform.machine()}: the quickstart, {learners} "
        f"workers that learn, {len(torch)} pairs of runs in turns, {steps} steps each after "
        f"{_WARM} that warm up; median milliseconds.",
        "",
        "| | torch | fsdp | more |",
        "|---|---:|---:|---:|",
    ]
    for name in ("step", *_NODES):
        a, b = of(torch, name), of(fsdp, name)
        lines.append(f"| {name} | {a * 1e3:.1f} | {b * 1e3:.1f} | {b / a - 1:+.0%} |")
    lines += [
        "",
        "A step of fsdp over one of torch, by pairs: "
        f"{', '.join(f'{share:+.0%}' for share in more)}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
