"""Options of ``siirl-dask check``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import RUN


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.epilog = "exit codes: 0 nothing is damaged, 1 something is, 2 there is no run"


def run_check(options: argparse.Namespace) -> int:
    """Print what is found of the run, and return the exit code."""
    from siirl_dask.commands.check import check

    return check(options.run)
