"""Shares options, and the record of parts that are measured one by one, between the command lines
of the comparisons with TRL.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from against_trl.page import Measured, measured_now

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@dataclass(frozen=True)
class Part:
    """A part of a comparison that can be measured again by itself."""

    name: str
    command: str
    """Command that measures this part again."""
    measure: Callable[[], dict[str, Any]]


def check_trl() -> None:
    """End the process with a message where TRL is not installed."""
    if find_spec("trl") is None:
        sys.exit('there is no TRL here: pip install "trl>=1.16,<1.17"')


def add_timing(parser: argparse.ArgumentParser, *, rounds: int, round_steps: int) -> None:
    """Add the options of the rounds in which the two sides alternate."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help=f"in which the two alternate to be timed; default {rounds}",
    )
    parser.add_argument(
        "--round-steps",
        type=int,
        default=round_steps,
        help=f"timed steps of a round; default {round_steps}",
    )


def add_parts(parser: argparse.ArgumentParser, parts: Iterable[str]) -> None:
    """Add the option that chooses among ``parts``."""
    names = list(parts)
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, help="what to measure; default all"
    )


def add_outputs(parser: argparse.ArgumentParser, page: Path) -> None:
    """Add the options of what is written: the page and the raw record."""
    parser.add_argument("--out", type=Path, default=page, help="the page; plots go beside it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw record")


def measure_parts(
    chosen: Iterable[Part], record: Path, write: Callable[[dict[str, Measured]], None]
) -> dict[str, Measured]:
    """Measure the chosen parts, and ``write`` after each one all that the record or this process
    has measured. Returns all parts.
    """
    parts: dict[str, Measured] = {}
    if record.exists():
        parts = json.loads(record.read_text())
    for part in chosen:
        print(f"measuring {part.name}", flush=True)
        parts[part.name] = measured_now(part.command, part.measure())
        write(parts)
    return parts
