"""Options of ``siirl-dask doctor``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import CONFIG, add_overrides, overrides_of


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help=f"{CONFIG}; default: this machine alone",
    )
    add_overrides(parser, "such as cluster.address=tcp://host:8786")
    parser.add_argument(
        "--cluster", metavar="FILE", help="the file that describes a cluster (cluster.spec)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "exit codes: 0 no fault, 1 a fault, 2 CONFIG cannot be used"


def run_doctor(options: argparse.Namespace) -> int:
    """Print what is found, and return the exit code."""
    from siirl_dask.commands.doctor import doctor

    return doctor(options.config, overrides_of(options), as_json=options.json)
