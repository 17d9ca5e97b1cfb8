"""The command line of a pipeline script, and the end of every command: exit codes and error
messages.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO, TypeVar

from siirl_dask.config import Config
from siirl_dask.config.file import load
from siirl_dask.devices import check_plugins
from siirl_dask.errors import Interrupted, SiirlError, UserError
from siirl_dask.models.broken_imports import hide
from siirl_dask.observe import announce
from siirl_dask.planner import DAG
from siirl_dask.runs.reader import Run, open_run

EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 an argument, config, DAG or dataset is unusable, 130 "
    "stopped by Ctrl-C or SIGTERM, 141 the reader of the output closed it"
)
Recipe = Callable[[Config], DAG]
_T = TypeVar("_T")


def main(
    training: Recipe, validation: Recipe | None = None, arguments: Sequence[str] | None = None
) -> Run:
    """Train the DAG that ``training`` makes: ``python script.py CONFIG [key=value ...] [--fresh |
    --force]``.

    The script's DAG replaces the configuration's. ``validation`` makes the DAG that runs over the
    validation data in between; None takes the default of the training DAG
    (``siirl_dask.recipes.common.validation``). Returns the run, as ``open_run`` does; if training
    fails or is stopped, the process ends with a message instead.
    """
    parser = argparse.ArgumentParser(epilog=EXIT_CODES)
    add_resume_options(parser)
    add_cluster_option(parser)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.lr=2e-6")

    def start() -> Run:
        options = parser.parse_intermixed_args(arguments)
        config = load(options.config, overrides_of(options))
        dag = training(config)
        train(config, dag, validation(config) if validation else None, options)
        return open_run(config.run.url)

    return exit_with_message(start)


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--fresh`` and ``--force``; without either, an existing run is resumed."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin anew: what the run left in its folder is removed",
    )
    parser.add_argument(
        "--force", action="store_true", help="resume the run although CONFIG or the DAG has changed"
    )


def add_cluster_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster``, which is short for a key."""
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="start the Dask cluster that FILE describes (cluster.spec)",
    )


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides ``key=value``, with that of ``--cluster`` first."""
    cluster = [] if options.cluster is None else [f"cluster.spec={json.dumps(options.cluster)}"]
    return [*cluster, *options.overrides]


def train(config: Config, dag: DAG, validation: DAG | None, options: argparse.Namespace) -> None:
    """Run the training as ``--fresh`` and ``--force`` say, and print what came of it."""
    check_plugins()
    # dask and torch: seconds that `plan` and `--help` need not wait for
    from siirl_dask.commands.run_end import print_run_end
    from siirl_dask.driver.run import run

    summary = run(
        config, dag, validation, fresh=options.fresh, force=options.force, command=resuming(options)
    )
    if config.observe.progress:
        print_run_end(config, summary)


def resuming(options: argparse.Namespace) -> str:
    """Return the command that resumes the run, as one types it: without ``--fresh``, which would
    remove the run.
    """
    program = ["siirl-dask", "run"] if hasattr(options, "command") else ["python", sys.argv[0]]
    cluster = [] if options.cluster is None else [f"--cluster={options.cluster}"]
    force = ["--force"] if options.force else []
    return shlex.join([*program, options.config, *force, *cluster, *options.overrides])


def exit_with_message(work: Callable[[], _T]) -> _T:
    """Return the result of ``work``. A SiirlError becomes one message on stderr, any other error
    stays a traceback.
    """
    signal.signal(signal.SIGTERM, _as_interrupt)
    atexit.register(_end_soon)
    hide()
    _take_any_text(sys.stdout)
    # where functions named module:function in a config are looked for, too
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _with_output_flushed(work)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _end_for_closed_pipe()
    except SiirlError as error:
        announce(error)
        if isinstance(error, Interrupted):
            sys.exit(130)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _take_any_text(stream: TextIO) -> None:
    """Have a stream that knows few characters, such as ASCII's, show others by their number
    instead of ending us.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _with_output_flushed(work: Callable[[], _T]) -> _T:
    """Return the result of ``work`` once all that it printed is written, also where argparse prints
    help and exits.

    BrokenPipeError when the reader has closed the pipe; Python itself would only print that at its
    end.
    """
    try:
        result = work()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return result


def _end_for_closed_pipe() -> NoReturn:
    """End quietly with the status of a program that SIGPIPE ends: the reader, such as ``head``,
    has enough.
    """
    # Python flushes stdout once more at its end, and would print the error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


def _end_soon() -> None:
    """Keep Python from collecting all of torch's objects at exit, which takes a second.

    Not with triton or duckdb loaded: nanobind, which they are built with, would report leaks.
    """
    if not {"triton", "duckdb"} & sys.modules.keys():
        gc.freeze()


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
