"""Seconds that commands take in one or several checkouts, in turns: `--help`, `plan`, `rollouts` and others.

    python benchmarks/commands.py NAME=CHECKOUT [NAME=CHECKOUT ...] [--run NAME=RUN ...] [--rounds 7]

Each checkout runs with this interpreter, in a process of its own for every command; output goes to a pipe. A table in
Markdown is printed: the median of the rounds, and the lowest to the highest. The first round is not counted: it
reads the disk and compiles modules. `{run}` in a command is the run that `--run` names for the checkout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMANDS = ("--help", "plan --help", "plan {config}", "rollouts {run}")
CONFIG = Path("configs", "quickstart.yaml")


def seconds_of(checkout: Path, words: Sequence[str]) -> float:
    """Run a command of a checkout once. RuntimeError with what it wrote, if it fails."""
    path = os.pathsep.join([str(checkout), str(checkout / "storage")])
    environment = {**os.environ, "PYTHONPATH": path}
    begin = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "siirl_dask.cli", *words],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if ended.returncode:
        raise RuntimeError(f"{checkout}: {' '.join(words)}: {ended.stdout}{ended.stderr}")
    return seconds


def measure(
    checkouts: Mapping[str, Path], runs: Mapping[str, str], command: str, rounds: int
) -> dict[str, list[float]]:
    """Seconds by checkout, all in turns, after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in checkouts}
    for number in range(rounds + 1):
        for name, checkout in checkouts.items():
            config = str(checkout / CONFIG)
            words = command.format(config=config, run=runs.get(name, "")).split()
            seconds = seconds_of(checkout, words)
            if number:
                found[name].append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", metavar="NAME=CHECKOUT")
    parser.add_argument("--run", action="append", default=[], metavar="NAME=RUN", dest="runs")
    parser.add_argument(
        "--command",
        action="append",
        dest="commands",
        help="instead of the usual ones, such as --command='plan {config}'",
    )
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    checkouts = {}
    for pair in arguments.checkouts:
        name, _, folder = pair.partition("=")
        if not folder or not Path(folder, CONFIG).is_file():
            parser.error(f"{pair}: expected NAME=CHECKOUT, and no {CONFIG} is there")
        checkouts[name] = Path(folder).resolve()
    runs = dict(pair.split("=", 1) for pair in arguments.runs)
    print(f"| command | {' | '.join(checkouts)} |")
    print(f"| --- | {' | '.join('---:' for _ in checkouts)} |")
    commands = COMMANDS if arguments.commands is None else arguments.commands
    for command in commands:
        if "{run}" in command and len(runs) < len(checkouts):
            continue
        cells = [
            f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
            for seconds in measure(checkouts, runs, command, arguments.rounds).values()
        ]
        print(f"| `{command}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
