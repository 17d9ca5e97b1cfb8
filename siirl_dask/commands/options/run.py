"""Options of ``siirl-dask run``."""

from __future__ import annotations

import argparse

from siirl_dask.commands.options.common import (
    CONFIG,
    add_cluster_option,
    add_overrides,
    add_resume_options,
    overrides_of,
)
from siirl_dask.commands.program.interrupts import EndsAtOnce


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG)
    add_overrides(parser, "such as trainer.lr=2e-6")
    add_cluster_option(parser)
    add_resume_options(parser)


def run(options: argparse.Namespace) -> None:
    """Train as the configuration says."""
    from siirl_dask.config.file import load_config_file
    from siirl_dask.devices import check_plugins

    with EndsAtOnce():
        # before what takes seconds is imported, for a name that is mistyped
        file = load_config_file(options.config, overrides_of(options))
        check_plugins()
        from siirl_dask.commands.script import train
        from siirl_dask.driver.phases import dags

        training, validation = dags(file)
    train(file.config, training, validation, options)
