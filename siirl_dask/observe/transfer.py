"""Shows how much of a download has come: a bar on a terminal, a line now and then elsewhere."""

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

_PAUSE = 10.0  # seconds between lines


@contextmanager
def transfer(
    what: str, nbytes: int, console: Console, enabled: bool
) -> Iterator[Callable[[int], None]]:
    """Yield ``add(nbytes)``, which any thread may call as bytes come; ``nbytes`` are expected in
    all.

    A line at the end tells what came in which time, unless nothing did.
    """
    began = time.monotonic()
    seen = _Seen()
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
                    and time.monotonic() - max(began, seen.told_at) >= _PAUSE
                ):
                    seen.told_at = time.monotonic()
                    console.print(
                        Text(f"{what}: {decimal(seen.nbytes)} of {decimal(nbytes)}"), soft_wrap=True
                    )

        yield add
    if seen.nbytes:
        seconds = time.monotonic() - began
        console.print(Text(f"{what}: {decimal(seen.nbytes)} in {seconds:.1f} s"), soft_wrap=True)


@dataclass(slots=True)
class _Seen:
    nbytes: int = 0
    told_at: float = 0.0
