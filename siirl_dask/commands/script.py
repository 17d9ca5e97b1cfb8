"""The command line of a pipeline script, and what it shares with ``siirl-dask run``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from siirl_dask.commands.options.common import (
    CONFIG,
    add_cluster_option,
    add_overrides,
    add_resume_options,
    overrides_of,
)
from siirl_dask.commands.program.ending import (
    EXIT_CODES,
    exit_with_message,
    find_functions_here,
)
from siirl_dask.commands.program.interrupts import EndsAtOnce
from siirl_dask.config import Config
from siirl_dask.config.file import load
from siirl_dask.devices import check_plugins
from siirl_dask.planner import DAG
from siirl_dask.runs.reader import Run, open_run

__all__ = [
    "EXIT_CODES",
    "Recipe",
    "add_cluster_option",
    "add_resume_options",
    "exit_with_message",
    "main",
    "overrides_of",
    "resuming",
    "train",
]
Recipe = Callable[[Config], DAG]


def main(
    training: Recipe, validation: Recipe | None = None, arguments: Sequence[str] | None = None
) -> Run:
    """Train the DAG that ``training`` makes: ``python script.py CONFIG [key=value ...] [--fresh |
    --force]``.

    The script's DAG replaces the configuration's. ``validation`` makes the DAG that runs over the
    validation data in between; None takes the default of the training DAG
    (``siirl_dask.recipes.validation_dag``). Returns the run, as ``open_run`` does; if training
    fails or is stopped, the process ends with a message instead.
    """
    parser = argparse.ArgumentParser(epilog=EXIT_CODES)
    add_resume_options(parser)
    add_cluster_option(parser)
    parser.add_argument("config", metavar="CONFIG", help=CONFIG)
    add_overrides(parser, "such as trainer.lr=2e-6")

    def start() -> Run:
        find_functions_here()
        options = parser.parse_intermixed_args(arguments)
        with EndsAtOnce():
            config = load(options.config, overrides_of(options))
        dag = training(config)
        train(config, dag, validation(config) if validation else None, options)
        return open_run(config.run.url)

    return exit_with_message(start)


def train(config: Config, dag: DAG, validation: DAG | None, options: argparse.Namespace) -> None:
    """Run the training as ``--fresh`` and ``--force`` say, and print what came of it."""
    with EndsAtOnce():
        check_plugins()
        # dask and torch: seconds that `plan` and `--help` need not wait for
        from siirl_dask.commands.run_end import print_run_end
        from siirl_dask.driver.run import run

    summary = run(
        config,
        dag,
        validation,
        fresh=options.fresh,
        force=options.force,
        command=resuming(options),
    )
    if config.observe.progress:
        print_run_end(config, summary)


def resuming(options: argparse.Namespace) -> str:
    """Return the command that resumes the run, as one types it: without ``--fresh``, which would
    remove the run.
    """
    program = ["siirl-dask", "run"] if hasattr(options, "command") else ["python", sys.argv[0]]
    cluster = []
    if options.cluster is not None:
        cluster = [f"--cluster={options.cluster}"]
    force = []
    if options.force:
        force = ["--force"]
    return shlex.join([*program, options.config, *force, *cluster, *options.overrides])
