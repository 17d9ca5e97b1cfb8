"""This package's GRPO and TRL's on the same model and task: one update, whole runs, samples per second.

    python benchmarks/compare_trl.py                               # all of it, into docs/benchmarks
    python benchmarks/compare_trl.py --parts speed                 # this part anew; the others stay as they were
    python benchmarks/compare_trl.py --seeds 0 --steps 10 --out /tmp/trl.md   # a quick look

It wants TRL in its environment: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from against_trl import measuring
from against_trl.page import Measured, summary, write_page
from against_trl.runs import OURS, TOLD, TRL, curves, losses, speed
from against_trl.setting import Setting
from siirl_dask.tasks.sorting import task_in, write_sorting_task

PARTS = ("losses", "curves", "speed")
# on one core, on two cores, and four on two cores, of which two generate and two learn
WORKERS = (1, 2, 4)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs; default 0 1 2"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run; default 60")
    measuring.add_timing(parser, rounds=5, round_steps=10)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of a worker; default 1"
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        choices=WORKERS,
        default=list(WORKERS),
        help="of ours when timed: default all",
    )
    measuring.add_parts(parser, PARTS)
    parser.add_argument(
        "--task", type=Path, help="folder of the sorting task, which is kept; default: a fresh one"
    )
    measuring.add_outputs(parser, measuring.PAGES / "trl.md")
    return parser


def main() -> None:
    given = make_parser().parse_args()
    measuring.check_trl()
    record = given.results / "trl.json"
    with TemporaryDirectory() as fresh:
        folder = (given.task or Path(fresh)).absolute()
        if not task_in(folder).train.exists():
            print("warm start of the model", flush=True)
            write_sorting_task(folder)
        write = partial(write_page, given.out, record)
        parts = measuring.measure_parts(chosen_parts(given, str(folder)), record, write)
    for line in summary(parts):
        print(line)
    print(f"{given.out}, .png; {record}")
    wrong = unequal_cases(parts)
    if wrong:
        sys.exit(f"not equal: {', '.join(wrong)}")


def unequal_cases(parts: dict[str, Measured]) -> list[str]:
    """Return the cases of the losses that ought to be equal on both sides and are not."""
    if "losses" not in parts:
        return []
    cases = parts["losses"]["found"]["cases"]
    return [case["case"] for case in cases if not case["equal"] and not case["differs"]]


def chosen_parts(given: argparse.Namespace, folder: str) -> Iterator[measuring.Part]:
    """Yield the chosen parts, speed once for each number of our workers."""
    for part in given.parts:
        for workers in given.workers if part == "speed" else [1]:
            name = part if workers == 1 else f"{part} of {workers} workers"
            measure = partial(_measure, part, given, folder, workers)
            yield measuring.Part(name, _command(given, part, workers), measure)


def _measure(part: str, given: argparse.Namespace, folder: str, workers: int) -> dict[str, Any]:
    setting = Setting(folder=folder, steps=given.steps, threads=given.threads, workers=workers)
    if part == "losses":
        return losses(setting)
    if part == "curves":
        return curves(setting, given.seeds)
    return speed(setting, given.rounds, given.round_steps, kinds=(OURS, TOLD, TRL))


def _command(given: argparse.Namespace, part: str, workers: int) -> str:
    """Return the command that measures one part again, without the folders."""
    options = {
        "losses": "",
        "curves": f" --seeds {' '.join(map(str, given.seeds))} --steps {given.steps}",
        "speed": f" --workers {workers} --rounds {given.rounds} --round-steps {given.round_steps}",
    }
    return (
        f"python benchmarks/compare_trl.py --parts {part}{options[part]} --threads {given.threads}"
    )


if __name__ == "__main__":
    main()
