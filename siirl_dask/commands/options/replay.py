"""Options of ``siirl-dask replay``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import RUN, add_overrides
from siirl_dask.commands.options.steps import steps_between
from siirl_dask.commands.program.interrupts import EndsAtOnce


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help=RUN)
    add_overrides(parser, "where to run, such as cluster.workers=2")
    parser.add_argument(
        "--from",
        dest="first",
        metavar="NODE",
        required=True,
        help="node to begin with",
    )
    parser.add_argument(
        "--steps",
        type=steps_between,
        default=":",
        metavar="A:B",
        help="steps A to B, both included; default: all",
    )
    parser.add_argument(
        "--checkpoint",
        default="before",
        metavar="STEP|before|latest|none",
        help=(
            "whose weights a model gets that a node asks for; default: before, the newest one "
            "older than each step"
        ),
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="key=value",
        help="such as rewards.function=file.py:f",
    )
    parser.add_argument(
        "--node",
        dest="nodes",
        action="append",
        default=[],
        metavar="NAME=file.py:f",
        help="another function for a node",
    )


def run_replay(options: argparse.Namespace) -> None:
    """Run the nodes again, and print what that changes."""
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        check_plugins()
        from siirl_dask.commands.replay import ReplayRequest, render, replay
        from siirl_dask.runs.past_weights import checkpoint_choice

    request = ReplayRequest(
        run=options.run,
        first=options.first,
        steps=options.steps,
        checkpoint=checkpoint_choice(options.checkpoint),
        settings=options.settings,
        nodes=options.nodes,
        overrides=options.overrides,
    )
    print(render(replay(request)))
