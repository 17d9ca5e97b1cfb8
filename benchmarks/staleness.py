"""Steps a second and reward curves with generation 0, 1 and 2 steps ahead of training.

    python benchmarks/staleness.py [--ahead 0 1 2] [--seeds 0 1 2] [--steps 60] [--out docs/benchmarks/staleness.md]

The quickstart's task with one mini-batch a step, on two workers: one generates, one learns. A run of its own for each
case, seeds one after the other so that the cases take turns.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure
from rich.console import Console

from siirl_dask.observe import read_metrics

_FIXED = (
    "cluster.workers=2",
    "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
    "algorithm.minibatches=1",
    "trainer.lr=2e-4",
    "rollout.n=16",
    "validation.every=20",
    "checkpoint.every=0",
    "observe.progress=false",
)


@dataclass(frozen=True)
class Curve:
    seconds: list[float]
    """Seconds of each training step."""
    rewards: list[float]
    validation: float
    """The last."""
    generating: float
    """Median seconds of a step's generation and of its training."""
    training: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    curves: dict[int, list[Curve]] = {ahead: [] for ahead in given.ahead}
    with TemporaryDirectory() as folder:
        for seed in given.seeds:
            for ahead in given.ahead:
                curves[ahead].append(measure(folder, ahead, seed, given.steps))
    text = report(curves, given.steps, len(given.seeds))
    Console().print(text)
    if given.out:
        given.out.write_text(text)
        draw(curves).savefig(given.out.with_suffix(".png"))


def measure(folder: str, ahead: int, seed: int, steps: int) -> Curve:
    name = f"ahead-{ahead}-seed-{seed}"
    values = [
        f"run.name={name}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"rollout.max_staleness={ahead}",
    ]
    command = [sys.executable, "-m", "siirl_dask.cli", "quickstart", *_FIXED, *values]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    records = read_metrics(str(Path(folder, "runs", name)))
    train = [record for record in records if record["phase"] == "train"]
    return Curve(
        [record["seconds"] for record in train],
        [record["metrics"]["reward/mean"] or 0.0 for record in train],
        [
            record["metrics"]["reward/mean"] or 0.0
            for record in records
            if record["phase"] == "validation"
        ][-1],
        median(record["metrics"]["seconds/rollout"] or 0.0 for record in train),
        median(
            sum(record["metrics"][f"seconds/{node}"] or 0.0 for node in ("old_logprobs", "update"))
            for record in train
        ),
    )


def report(curves: Mapping[int, Sequence[Curve]], steps: int, seeds: int) -> str:
    rates = {
        ahead: median(1 / median(curve.seconds) for curve in found)
        for ahead, found in curves.items()
    }
    first = next(iter(rates))
    lines = [
        "# Generation ahead of training",
        "",
        f"`python benchmarks/staleness.py` on {platform.machine()}: the quickstart's task, {steps} "
        f"steps, {seeds} seeds, one mini-batch a step, one worker that generates and one that "
        "learns. Steps a second: of each run the median step, of the seeds the median. Before "
        "each validation and at the end generation waits for the newest weights.",
        "",
        f"| `rollout.max_staleness` | steps/s | of {first}'s | s generating | s training | mean "
        "reward, last 10 steps | last validation |",
        "|---|---|---|---|---|---|---|",
        *(_line(ahead, found, rates[ahead], rates[first]) for ahead, found in curves.items()),
        "",
        "![Mean reward of each step, by steps ahead](staleness.png)",
        "",
    ]
    return "\n".join(lines)


def _line(ahead: int, curves: Sequence[Curve], rate: float, first: float) -> str:
    rewards = " ".join(f"{mean(curve.rewards[-10:]):.3f}" for curve in curves)
    validation = " ".join(f"{curve.validation:.3f}" for curve in curves)
    seconds = (
        f"{median(c.generating for c in curves):.2f} | {median(c.training for c in curves):.2f}"
    )
    return f"| {ahead} | {rate:.2f} | {rate / first:.2f} | {seconds} | {rewards} | {validation} |"


def draw(curves: Mapping[int, Sequence[Curve]]) -> Figure:
    """Each seed's curve, thin, and the mean of them."""
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for colour, (ahead, found) in zip(
        ("#0072B2", "#D55E00", "#009E73", "#8E4A84"), curves.items(), strict=False
    ):
        for curve in found:
            axes.plot(
                range(1, len(curve.rewards) + 1),
                curve.rewards,
                color=colour,
                alpha=0.25,
                linewidth=0.8,
            )
        means = [mean(values) for values in zip(*(curve.rewards for curve in found), strict=True)]
        axes.plot(range(1, len(means) + 1), means, color=colour, label=f"max_staleness {ahead}")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
