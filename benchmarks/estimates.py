"""Holds estimates of ``plan --on cpu`` against runs: seconds of nodes and of whole steps.

    python benchmarks/estimates.py [--sizes 0.3M 32M] [--steps 6] [--out PAGE.md]

GRPO with the transformers engine, a torch thread a worker: one worker, two that do everything, and
one that generates beside one that learns. Each run is followed by ``siirl-dask plan --analyze RUN
--on cpu``, which measures the CPU and leaves the run's first step out. Models are random, and all
their responses are equally long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sections import replace_section
from siirl_dask import grpo
from siirl_dask.driver.run import run
from step_parts import SIZES, prepared

WITHIN = 0.3
_LAYOUTS = {
    "1": ("1", "{}"),
    "2, both": ("2", "{}"),
    "1 + 1": ("2", "{rollout: [0], reward: [0], policy: [1]}"),
}
"""Number of workers, and their placement."""
_NODES = ("rollout", "old_logprobs", "update")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.3M", "32M"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, help="page whose section is replaced")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines, errors = [], []
    for size, layout in product(given.sizes, _LAYOUTS):
        with TemporaryDirectory() as folder:
            found = measure(Path(folder), size, layout, given.steps)
        errors.append(found["seconds"]["estimated"] / found["seconds"]["measured"] - 1)
        lines.append(line_of(size, layout, found))
        print(lines[-1], file=sys.stderr, flush=True)
    text = report(lines, errors, given.steps)
    print(text)
    if given.out:
        replace_section(given.out, text)


def measure(folder: Path, name: str, layout: str, steps: int) -> dict[str, Any]:
    """Run, and return what ``plan --analyze`` says of the run."""
    workers, placement = _LAYOUTS[layout]
    config, _ = prepared(folder, name, "transformers", steps, workers=workers, placement=placement)
    run(config, grpo(config))
    command = str(Path(sys.executable).with_name("siirl-dask"))
    given = ("plan", "--analyze", config.run.url, "--on", "cpu", "--format", "json")
    said = subprocess.run([command, *given], check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(said)
    return found


def line_of(size: str, layout: str, found: Mapping[str, Any]) -> str:
    nodes = {node["name"]: node["seconds"] for node in found["nodes"]}
    cells = [f"{both(nodes[name])}" for name in _NODES] + [both(found["seconds"])]
    return f"| {size} | {layout} | {' | '.join(cells)} |"


def both(seconds: Mapping[str, float]) -> str:
    estimated, measured = seconds["estimated"], seconds["measured"]
    return f"{estimated:.3g}, {measured:.3g} ({estimated / measured - 1:+.0%})"


def report(lines: Sequence[str], errors: Sequence[float], steps: int) -> str:
    inside = sum(abs(error) <= WITHIN for error in errors)
    return "\n".join([
        "## Estimated and measured",
        "",
        f"`python benchmarks/estimates.py --steps {steps}` on {date.today():%d %B %Y}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end. "
        f"{inside} of {len(errors)} steps are within {WITHIN:.0%}.",
        "",
        "| model | workers | generation: s estimated, measured | log-probs | update | a step |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
