"""``siirl-dask check``: verifies every file of a run, and says what is whole, what is not, and
what a resume does.
"""

from __future__ import annotations

import threading
import time

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from siirl_dask.observe import PipeConsole, printable
from siirl_dask.runs.check import PartState, RunFinding, check_run
from siirl_dask.wording import redacted

_STYLES = {PartState.WHOLE: "green", PartState.UNFINISHED: "yellow", PartState.DAMAGED: "bold red"}


def check(url: str) -> int:
    """Print what is found of the run at ``url``, and return the exit code. ConfigError if there
    is no run.
    """
    console = PipeConsole()
    begun = time.monotonic()
    with _Bar() as bar:
        findings = check_run(url, bar.begin, bar.read)
    for finding in findings:
        _print(console, finding)
    damaged = sum(finding.state is PartState.DAMAGED for finding in findings)
    said = "nothing is damaged"
    if damaged:
        said = f"{damaged} damaged"
    console.print(
        Text(f"{said}; {bar.done:,} bytes read in {time.monotonic() - begun:.1f} s"), soft_wrap=True
    )
    if damaged:
        return 1
    return 0


def _print(console: Console, finding: RunFinding) -> None:
    text = Text(f"{finding.state:<10}  ", style=_STYLES[finding.state])
    text.append(printable(finding.part), style="default")
    if finding.text:
        text.append(f": {printable(redacted(finding.text))}", style="default")
    if finding.remedy:
        text.append(f"\n{'':<12}{printable(redacted(finding.remedy))}", style="dim")
    console.print(text, soft_wrap=True)


class _Bar:
    """Shows on stderr how many bytes are read, where that is a terminal."""

    def __init__(self) -> None:
        console = PipeConsole(stderr=True)
        self._bars = bars.Progress(
            bars.BarColumn(bar_width=30),
            bars.DownloadColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("check", total=None)
        self._lock = threading.Lock()
        self.done = 0

    def begin(self, total: int) -> None:
        """Set the bytes of all files."""
        self._bars.update(self._task, total=total)

    def read(self, nbytes: int) -> None:
        """Add the bytes of a file that has been read."""
        with self._lock:
            self.done += nbytes
        self._bars.advance(self._task, nbytes)

    def __enter__(self) -> _Bar:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()
