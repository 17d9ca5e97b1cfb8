"""Options of ``siirl-dask quickstart``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import add_cluster_option, add_overrides, overrides_of
from siirl_dask.commands.program.interrupts import EndsAtOnce


def add_quickstart(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_overrides(parser, "such as run.seed=1")
    add_cluster_option(parser)


def run_quickstart(options: argparse.Namespace) -> None:
    """Train the small model, and show what came of it."""
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        check_plugins()
        from siirl_dask.commands.quickstart import quickstart
        from siirl_dask.config.file import shipped

    quickstart(shipped("quickstart.yaml"), overrides_of(options))
