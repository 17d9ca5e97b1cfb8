"""GRPO with a tool by this package and by TRL's `environment_factory`: success, samples per second.

    python benchmarks/compare_trl_turns.py                             # all of it, into docs/benchmarks
    python benchmarks/compare_trl_turns.py --parts slow --cores 1      # this part anew; the others stay as they were
    python benchmarks/compare_trl_turns.py --rounds 1 --round-steps 2 --parts instant --out /tmp/turns.md

It wants TRL in its environment: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from against_trl import measuring
from against_trl.runs import SIDES, run_side, speed
from against_trl.turns_page import summary, write_page
from against_trl.turns_setting import TurnsSetting, copy_task, write_task

PARTS = ("success", "instant", "slow")
_MODULES = "turns"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    measuring.add_parts(parser, PARTS)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1], help="of the runs of success; default 0 1"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each run of success; default 20")
    parser.add_argument(
        "--cores", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="of speed; default 1 2"
    )
    measuring.add_timing(parser, rounds=3, round_steps=8)
    parser.add_argument(
        "--task",
        type=Path,
        help="folder of a calculator task, which is copied; default: a fresh one",
    )
    measuring.add_outputs(parser, measuring.PAGES / "trl_turns.md")
    return parser


def main() -> None:
    given = make_parser().parse_args()
    measuring.check_trl()
    record = given.results / "trl_turns.json"
    with TemporaryDirectory() as folder:
        if given.task is not None:
            copy_task(given.task, Path(folder))
        write_task(Path(folder))
        write = partial(write_page, given.out, record)
        parts = measuring.measure_parts(chosen_parts(given, folder), record, write)
    for line in summary(parts):
        print(line)
    print(f"{given.out}; {record}")


def chosen_parts(given: argparse.Namespace, folder: str) -> Iterator[measuring.Part]:
    """Yield the chosen parts, those of speed once for each number of cores."""
    for part in given.parts:
        for cores in [2] if part == "success" else given.cores:
            name = part
            if part != "success":
                name = f"{part}, {cores} core{'s' if cores > 1 else ''}"
            measure = partial(_measure, part, given, folder, cores)
            yield measuring.Part(name, _command(given, part, cores), measure)


def _measure(part: str, given: argparse.Namespace, folder: str, cores: int) -> dict[str, Any]:
    setting = TurnsSetting(folder=folder, steps=given.steps, workers=cores, slow=part == "slow")
    if part == "success":
        return _success(setting, given.seeds)
    return speed(setting, given.rounds, given.round_steps, _MODULES)


def _success(setting: TurnsSetting, seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    return {
        side: [asdict(run_side(side, replace(setting, seed=seed), _MODULES)) for seed in seeds]
        for side in SIDES
    }


def _command(given: argparse.Namespace, part: str, cores: int) -> str:
    """Return the command that measures one part again, without the folders."""
    if part == "success":
        options = f"--seeds {' '.join(map(str, given.seeds))} --steps {given.steps}"
    else:
        options = f"--cores {cores} --rounds {given.rounds} --round-steps {given.round_steps}"
    return f"python benchmarks/compare_trl_turns.py --parts {part} {options}"


if __name__ == "__main__":
    main()
