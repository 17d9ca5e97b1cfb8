"""Shows what a run waits for at its start: workers that come, models that are downloaded. In place on
a terminal, a line now and then elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from siirl_dask.errors import counted

_ARRIVALS_PAUSE = (
    5.0  # seconds between lines, and before the first: workers of this machine come sooner
)
_ARRIVALS_SILENCE = 60.0  # seconds after which a line is printed although nobody came


@contextmanager
def arrivals(workers: int, console: Console, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yield ``show(came)``, to be called as often as one likes until all ``workers`` are there."""
    if not enabled:
        yield lambda came: None
    elif console.is_terminal:
        with console.status("") as status:
            yield lambda came: status.update(_text(came, workers))
    else:
        yield _Lines(workers, console).show


def _text(came: int, workers: int) -> Text:
    return Text(f"{came} of {counted(workers, 'worker')} came")


class _Lines:
    """Prints a line when workers have come, at most every few seconds, and one when all are
    there.
    """

    def __init__(self, workers: int, console: Console) -> None:
        self._workers = workers
        self._console = console
        self._printed_at = time.monotonic()
        self._printed: int | None = None

    def show(self, came: int) -> None:
        now = time.monotonic()
        if self._is_due(came, now):
            self._printed_at = now
            self._printed = came
            self._console.print(_text(came, self._workers), soft_wrap=True)

    def _is_due(self, came: int, now: float) -> bool:
        if came >= self._workers and self._printed not in (None, came):
            return True
        pause = _ARRIVALS_PAUSE
        if came == self._printed:
            pause = _ARRIVALS_SILENCE
        return now - self._printed_at >= pause


_DOWNLOAD_PAUSE = 10.0  # seconds between lines


@contextmanager
def transfer(
    what: str,
    nbytes: int,
    console: Console,
    enabled: bool,
) -> Iterator[Callable[[int], None]]:
    """Yield ``add(nbytes)``, which any thread may call as bytes come; ``nbytes`` are expected in
    all.

    A line at the end tells what came in which time, unless nothing did.
    """
    began = time.monotonic()
    seen = _Downloaded()
    lock = threading.Lock()
    if not enabled:
        yield lambda came: None
        return
    with bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=20),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=nbytes)

        def add(came: int) -> None:
            with lock:
                seen.nbytes += came
                bar.update(task, completed=seen.nbytes)
                if (
                    not console.is_terminal
                    and time.monotonic() - max(began, seen.told_at) >= _DOWNLOAD_PAUSE
                ):
                    seen.told_at = time.monotonic()
                    line = f"{what}: {decimal(seen.nbytes)} of {decimal(nbytes)}"
                    console.print(Text(line), soft_wrap=True)

        yield add
    if seen.nbytes:
        seconds = time.monotonic() - began
        line = f"{what}: {decimal(seen.nbytes)} in {seconds:.1f} s"
        console.print(Text(line), soft_wrap=True)


@dataclass(slots=True)
class _Downloaded:
    nbytes: int = 0
    told_at: float = 0.0
