"""Shows how many workers of a cluster have come: in place on a terminal, a line now and then
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

_PAUSE = 5.0  # seconds between lines, and before the first: workers of this machine come sooner
_SILENCE = 60.0  # seconds after which a line is printed although nobody came


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
    return Text(f"{came} of {workers} workers came")


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
        pause = _SILENCE if came == self._printed else _PAUSE
        return now - self._printed_at >= pause
