"""The command line of a pipeline script, and how every command of siirl_dask ends."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from siirl_dask.config import Config
from siirl_dask.config.file import load
from siirl_dask.errors import Interrupted, SiirlError, UserError
from siirl_dask.models.broken_imports import hide
from siirl_dask.planner import DAG
from siirl_dask.runs.reader import Run, open_run

EXIT_CODES = "exit codes: 0 done, 1 the run failed, 2 something given cannot be used, 130 stopped by Ctrl-C or SIGTERM"
Recipe = Callable[[Config], DAG]
_T = TypeVar("_T")


def main(training: Recipe, validation: Recipe | None = None, arguments: Sequence[str] | None = None) -> Run:
    """Train the DAG that ``training`` makes: ``python script.py CONFIG [key=value ...] [--fresh | --force]``.

    The script's DAG stands in for the configuration's. ``validation`` makes the DAG that runs over the validation data
    in between; None takes the one that goes with the training DAG (``siirl_dask.recipes.common.validation``). Returns
    the run, to be asked questions; where training fails or is stopped, the process ends with a message instead.
    """
    parser = argparse.ArgumentParser(epilog=EXIT_CODES)
    add_resume_options(parser)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6")

    def start() -> Run:
        options = parser.parse_intermixed_args(arguments)
        config = load(options.config, options.overrides)
        dag = training(config)
        train(config, dag, validation(config) if validation else None, options)
        return open_run(config.run.url)

    return exit_with_message(start)


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """``--fresh`` and ``--force``; without either, a run that is there is resumed."""
    parser.add_argument("--fresh", action="store_true", help="begin anew: what the run left in its folder is removed")
    parser.add_argument("--force", action="store_true", help="go on with the run though CONFIG is not what it was")


def train(config: Config, dag: DAG, validation: DAG | None, options: argparse.Namespace) -> None:
    """Run the training as ``--fresh`` and ``--force`` say."""
    from siirl_dask.driver.run import run  # dask and torch: seconds that `plan` and `--help` need not wait for

    run(config, dag, validation, fresh=options.fresh, force=options.force)


def exit_with_message(work: Callable[[], _T]) -> _T:
    """The result of ``work``. An error that it raises on purpose becomes one message, any other stays a traceback."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    atexit.register(_end_soon)
    hide()
    sys.path.insert(0, str(Path.cwd()))  # functions named module:function in a config are looked for here too
    try:
        return _with_output_flushed(work)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _end_for_closed_pipe()
    except SiirlError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}", file=sys.stderr)
        sys.exit(130 if isinstance(error, Interrupted) else 2 if isinstance(error, UserError) else 1)


def _with_output_flushed(work: Callable[[], _T]) -> _T:
    """Return the result of ``work`` once all that it printed is written, also where argparse prints help and exits.

    BrokenPipeError when whoever read the output has closed it; at the end of the process that could only be shown.
    """
    try:
        result = work()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return result


def _end_for_closed_pipe() -> NoReturn:
    """End quietly with the status of a program that SIGPIPE ends: the reader, such as ``head``, has enough."""
    # Python flushes standard output once more at its end, and would complain again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


def _end_soon() -> None:
    """Python would go through all that torch made once more, for a second. nanobind, which triton and duckdb are built
    with, calls leaked what is left out.
    """
    if not {"triton", "duckdb"} & sys.modules.keys():
        gc.freeze()


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
