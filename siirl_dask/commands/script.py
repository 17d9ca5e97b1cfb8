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
    given = parser.parse_intermixed_args(arguments)

    def start() -> Run:
        config = load(given.config, given.overrides)
        dag = training(config)
        train(config, dag, validation(config) if validation else None, given)
        return open_run(config.run.url)

    return exit_with_message(start)


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """``--fresh`` and ``--force``; without either, a run that is there is resumed."""
    parser.add_argument("--fresh", action="store_true", help="begin anew: what the run left in its folder is removed")
    parser.add_argument("--force", action="store_true", help="go on with the run though CONFIG is not what it was")


def train(config: Config, dag: DAG, validation: DAG | None, given: argparse.Namespace) -> None:
    from siirl_dask.driver.run import run  # dask and torch: seconds that `plan` and `--help` need not wait for

    run(config, dag, validation, fresh=given.fresh, force=given.force)


def exit_with_message(work: Callable[[], _T]) -> _T:
    """The result of ``work``. An error that it raises on purpose becomes one message, any other stays a traceback."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    atexit.register(_end_soon)
    hide()
    sys.path.insert(0, str(Path.cwd()))  # functions named module:function in a config are looked for here too
    try:
        result = work()
        sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _end_for_closed_pipe()
    except SiirlError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}", file=sys.stderr)
        sys.exit(130 if isinstance(error, Interrupted) else 2 if isinstance(error, UserError) else 1)


def _end_for_closed_pipe() -> NoReturn:
    """Whoever read the output, such as ``head``, has enough: end quietly, as a program that SIGPIPE ends does."""
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
