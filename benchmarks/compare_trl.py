"""This package's GRPO and TRL's on the same model and task: one update, whole runs, samples per second.

    python benchmarks/compare_trl.py                               # all of it, into docs/benchmarks
    python benchmarks/compare_trl.py --parts speed                 # this part anew; the others stay as they were
    python benchmarks/compare_trl.py --seeds 0 --steps 10 --out /tmp/trl.md   # a quick look

It wants TRL in its environment: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from against_trl.page import Measured, measured_now, summary, write_page
from against_trl.runs import OURS, TOLD, TRL, curves, losses, speed
from against_trl.setting import Setting
from siirl_dask.tasks.sorting import task_in, write_sorting_task

PARTS = ("losses", "curves", "speed")
# on one core, on two cores, and four on two cores, of which two generate and two learn
WORKERS = (1, 2, 4)
_OUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "trl.md"
_RESULTS = Path(__file__).resolve().parent / "results"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs; default 0 1 2"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run; default 60")
    parser.add_argument(
        "--rounds", type=int, default=5, help="in which the two alternate to be timed; default 5"
    )
    parser.add_argument(
        "--round-steps", type=int, default=10, help="timed steps of a round; default 10"
    )
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
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="what to measure; default all",
    )
    parser.add_argument(
        "--task", type=Path, help="folder of the sorting task, which is kept; default: a fresh one"
    )
    parser.add_argument("--out", type=Path, default=_OUT, help="the page; .png is put beside it")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder for the raw records")
    return parser


def main() -> None:
    given = make_parser().parse_args()
    if find_spec("trl") is None:
        sys.exit('there is no TRL here: pip install "trl>=1.16,<1.17"')
    record = given.results / "trl.json"
    parts: dict[str, Measured] = json.loads(record.read_text()) if record.exists() else {}
    with TemporaryDirectory() as fresh:
        folder = (given.task or Path(fresh)).absolute()
        if not task_in(folder).train.exists():
            print("warm start of the model", flush=True)
            write_sorting_task(folder)
        for part, workers in chosen_parts(given):
            name = part if workers == 1 else f"{part} of {workers} workers"
            print(f"measuring {name}", flush=True)
            parts[name] = measured_now(
                _command(given, part, workers), _measure(part, given, str(folder), workers)
            )
            write_page(given.out, record, parts)
    for line in summary(parts):
        print(line)
    print(f"{given.out}, .png; {record}")
    cases = parts["losses"]["found"]["cases"] if "losses" in parts else []
    if wrong := [case["case"] for case in cases if not case["equal"] and not case["differs"]]:
        sys.exit(f"not equal: {', '.join(wrong)}")


def chosen_parts(given: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the parts with the number of our workers."""
    return [
        (part, workers)
        for part in given.parts
        for workers in (given.workers if part == "speed" else [1])
    ]


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
