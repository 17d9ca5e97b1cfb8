"""Steps a second with environments that answer late: `rollout.window` beside `rollout.max_staleness=1` alone.

    python benchmarks/window.py [--windows 4 8] [--steps 40] [--times 2] [--out docs/benchmarks/window.md]

The guessing game of `configs/quickstart_turns.yaml` on two workers: one plays, one learns. Each answer of the
environment takes a log-normal time. A run of its own for each case, the cases by turns; validations are left out, and
the one drain, of the last step, counts.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from rich.console import Console

from siirl_dask.environments import Step
from siirl_dask.observe import read_metrics
from siirl_dask.tasks.guessing import Guess

_MEDIAN = 0.1  # seconds of an answer
_SIGMA = 1.2
_PROMPTS = 16
_AHEAD = 1
_WARM_UP = 2  # steps that do not count
_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart_turns.yaml"


class LateGuess(Guess):
    """The guessing game, whose answers take a log-normal time."""

    async def step(self, text: str) -> Step | str:  # type: ignore[override]  # both are asked alike
        """Return the hint or the end, later."""
        await asyncio.sleep(random.lognormvariate(0.0, _SIGMA) * _MEDIAN)
        return super().step(text)


@dataclass(frozen=True)
class Case:
    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    rate: float
    """Steps a second."""
    staleness: float
    """Mean age of a row's oldest token, in steps."""
    dropped: float
    """Groups a step that became too old and began again."""
    reward: float
    """Mean of the last ten steps."""
    waited: float
    """Seconds a step of the worker that plays, mean."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--times", type=int, default=2, help="runs of each case, by turns")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = [Case(f"`max_staleness={age}`", (f"rollout.max_staleness={age}",)) for age in (1, 3)]
    cases += [
        Case(
            f"`max_staleness=3`, `steps_ahead={_AHEAD}`, `window={window}`",
            (
                "rollout.max_staleness=3",
                f"rollout.steps_ahead={_AHEAD}",
                f"rollout.window={window}",
            ),
        )
        for window in given.windows
    ]
    found: dict[str, list[Measured]] = {case.name: [] for case in cases}
    with TemporaryDirectory() as folder:
        for repeat in range(given.times):
            for case in cases:
                measured = measure(folder, case, repeat, given.steps)
                found[case.name].append(measured)
                print(f"{case.name}: {measured.rate:.2f} steps/s", flush=True)
    text = page(found, given.steps, given.times)
    Console().print(text)
    if given.out:
        given.out.write_text(text)


def measure(folder: str, case: Case, seed: int, steps: int) -> Measured:
    name = f"{len(list(Path(folder, 'runs').glob('case-*')))}"
    command = [sys.executable, "-m", "siirl_dask.cli", "run", str(_CONFIG)]
    command += [
        "cluster.workers=2",
        "cluster.placement={rollout: [0], environments: [0], policy: [1]}",
        f"environments.environment={Path(__file__).resolve()}:LateGuess",
        "environments.concurrency=1024",
        f"data.batch_size={_PROMPTS}",
        "algorithm.minibatches=1",
        "validation.url=null",
        "validation.test_url=null",
        "checkpoint.every=0",
        "observe.progress=false",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"run.name=case-{name}",
        *case.keys,
    ]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    records = read_metrics(str(Path(folder, "runs", f"case-{name}")))
    train = [record for record in records if record["phase"] == "train"]

    def mean_of(metric: str, counted: Sequence[Mapping[str, Mapping[str, float]]]) -> float:
        return mean(record["metrics"].get(metric) or 0.0 for record in counted)

    later = train[_WARM_UP:]
    return Measured(
        rate=1 / mean(record["seconds"] for record in later),
        staleness=mean_of("staleness/mean", later),
        dropped=mean_of("rollout/dropped_groups", later),
        reward=mean_of("reward/mean", train[-10:]),
        waited=mean_of("seconds/rollout", later),
    )


def page(found: Mapping[str, Sequence[Measured]], steps: int, times: int) -> str:
    first = mean(one.rate for one in next(iter(found.values())))
    lines = [
        "# Environments that answer late, and steps that take what is ready",
        "",
        f"`python benchmarks/window.py` on {platform.machine()}: the guessing game of "
        f"`configs/quickstart_turns.yaml`, {_PROMPTS} prompts of 8 episodes a step, {steps} steps, "
        "one worker that plays and one that learns, on two cores. An answer of the environment "
        f"takes a log-normal time (median {_MEDIAN} s, sigma {_SIGMA}). {times} runs of each case, "
        f"by turns, the first {_WARM_UP} steps of each left out, and the last, which waits for all, "
        "counted. Without a window `max_staleness` is the steps generated ahead. Means of the runs, "
        "with their range.",
        "",
        "| `rollout` | steps/s | of the first | s generating | age of the oldest token, steps | groups "
        "begun again a step | mean reward, last 10 steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        rates = [one.rate for one in runs]
        lines.append(
            f"| {name} | {mean(rates):.2f} ({min(rates):.2f} to {max(rates):.2f}) "
            f"| {mean(rates) / first:.2f} | {mean(one.waited for one in runs):.2f} "
            f"| {mean(one.staleness for one in runs):.2f} "
            f"| {mean(one.dropped for one in runs):.2f} "
            f"| {' '.join(f'{one.reward:.3f}' for one in runs)} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
