"""``siirl-dask watch``: shows a run that may be on another machine, from its URL alone, until it
has ended.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from siirl_dask.observe import PipeConsole, Progress, Record, Status
from siirl_dask.planner import Phase
from siirl_dask.views.watch.look import Life, Look, Watcher
from siirl_dask.views.watch.screen import screen

_EXIT_CODES = (
    "exit codes: 0 the run is complete, or is under way with --once, 1 it failed or its process is "
    "gone, 2 there is no run, 130 it was interrupted, or you ended this with Ctrl-C"
)
_EVERY = 2.0


def add_watch(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument("--once", action="store_true", help="print what there is now, and end")
    command.add_argument(
        "--every",
        type=_seconds,
        default=_EVERY,
        metavar="SECONDS",
        help=f"pause between looks; default: {_EVERY:g}",
    )
    command.epilog = _EXIT_CODES


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ArgumentTypeError(f"{text!r}: expected seconds from 0.1 to 3600")
    return seconds


def watch(chosen: Namespace) -> int:
    """Show the run until it has ended, or once, and return the exit code. ConfigError if there
    is no run.
    """
    watcher = Watcher(chosen.run)
    console = PipeConsole()
    look = watcher.look(time.monotonic())
    if chosen.once or look.life.is_over:
        console.print(screen(look, console.width))
    elif console.is_terminal:
        look = _live(console, watcher, look, chosen.every)
    else:
        look = _lines(console, watcher, look, chosen.every)
    return _exit_code(look, once=chosen.once)


def _live(console: Console, watcher: Watcher, look: Look, every: float) -> Look:
    with Live(
        screen(look, console.width),
        console=console,
        auto_refresh=False,
        vertical_overflow="crop",
    ) as live:
        while not look.life.is_over:
            time.sleep(every)
            look = watcher.look(time.monotonic())
            live.update(screen(look, console.width), refresh=True)
    return look


def _lines(console: Console, watcher: Watcher, look: Look, every: float) -> Look:
    """Print a line now and then, as a run does where it has no terminal."""
    console.print(screen(look, console.width))
    progress = Progress(look.total or 0, console)
    shown = _keys(look.records)
    progress.start(None, look.url, look.done)
    said = ""
    while not look.life.is_over:
        time.sleep(every)
        look = watcher.look(time.monotonic())
        for record in look.records:
            if (record["phase"], record["step"]) not in shown:
                _print(progress, record)
        shown = _keys(look.records)
        if look.trouble != said:
            said = look.trouble
            progress.note(said or "it can be read again")
    progress.close()
    console.print(screen(look, console.width))
    return look


def _keys(records: Sequence[Record]) -> set[tuple[Phase, int]]:
    return {(record["phase"], record["step"]) for record in records}


def _print(progress: Progress, record: Record) -> None:
    if record["phase"] == Phase.TRAIN:
        progress.step(record)
    else:
        progress.validation(record["step"], record["metrics"], record["phase"])


def _exit_code(look: Look, *, once: bool) -> int:
    codes = {Status.COMPLETE: 0, Status.FAILED: 1, Status.INTERRUPTED: 130}
    if look.life is Life.ENDED and look.summary is not None:
        return codes[look.summary.status]
    if look.life is Life.GONE:
        return 1
    return 0
