"""Options of ``siirl-dask unpack``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.program.interrupts import EndsAtOnce


def add_unpack(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model", metavar="MODEL", help="the model's folder or URL, such as hf://openai/gpt-oss-20b"
    )
    parser.add_argument("to", metavar="DEST", help="a folder or URL where there is nothing yet")


def run_unpack(options: argparse.Namespace) -> None:
    """Write the model with unpacked weights, and print how they were packed."""
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        check_plugins()
        from siirl_dask.commands.unpack import unpack

    method = unpack(options.model, options.to)
    print(
        f"the weights of {options.model}, which were packed by {method}, are in {options.to}, "
        "unpacked"
    )
