"""Options of ``siirl-dask clean``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import RUN


def add_clean(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument(
        "--keep-stages",
        type=int,
        metavar="N",
        help="rows of the N newest steps; default: of all",
    )
    parser.add_argument("--replays", action="store_true", help="tables of replays as well")


def run_clean(options: argparse.Namespace) -> None:
    """Delete what the run does not need, and print what that was."""
    from siirl_dask.commands.clean import clean

    deleted = clean(
        options.run,
        dry_run=options.dry_run,
        keep_stages=options.keep_stages,
        replays=options.replays,
    )
    print(deleted)
