"""Processes of parts, each in a session of its own, so that all that it started ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts import Part, command

LAST_LINES = 15
PATIENCE = 8.0  # seconds for pytest to write its report after SIGINT
_VERDICT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b.*\[ *\d+%\]")
_NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+)")
_PRINTED = re.compile(
    r"computed by|GB/s|step [123]:|peak of torch|heads of|parameters, \d+ rows|accuracy"
)


@dataclass
class Running:
    """A part's process, from its start to its end."""

    part: Part
    log: Path
    process: subprocess.Popen[bytes]
    deadline: float
    """Value of ``time.monotonic()`` at which it is ended."""
    began: float = field(default_factory=time.monotonic)
    timed_out: bool = False

    @classmethod
    def start(
        cls, part: Part, out: Path, log: Path, environment: Mapping[str, str], seconds: float
    ) -> Running:
        """Start the part with at most ``seconds`` to run. To be called in the main thread."""
        # of a job in the background, whose children inherit it
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("wb") as file:
            process = subprocess.Popen(
                command(part, out),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(part=part, log=log, process=process, deadline=time.monotonic() + seconds)

    def ended(self) -> bool:
        """Whether it has ended by itself or for its time, in which case all that it started is
        killed.
        """
        if self.process.poll() is not None:
            self.kill()
            return True
        if time.monotonic() > self.deadline + PATIENCE:
            self.kill()
            return True
        if time.monotonic() > self.deadline and not self.timed_out:
            self.timed_out = True
            self._signal(signal.SIGINT)
        return False

    def kill(self) -> None:
        """Kill the process and its group, and reap it."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def outcome(self, *, cut_off: bool = False) -> dict[str, Any]:
        """Its line of results: state, seconds, what the tests gave, and the end of its log where
        it did not pass.
        """
        code = self.process.returncode
        line: dict[str, Any] = {
            "part": self.part.name,
            "state": _state(code, self.timed_out, cut_off),
        }
        line["seconds"] = round(time.monotonic() - self.began, 1)
        text = self.log.read_text(errors="replace")
        if self.part.tests:
            line.update(tests_of(text))
        if line["state"] != "passed":
            line["code"] = code
            line["last"] = last_lines(text)
        return line

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # the whole group has ended


def _state(code: int | None, timed_out: bool, cut_off: bool) -> str:
    if cut_off:
        return "cut off"
    if timed_out:
        return "timed out"
    if code == 0:
        return "passed"
    return "failed"


def tests_of(text: str) -> dict[str, Any]:
    """Counts of verdicts in a log of ``pytest -v``, which it has for tests that ended before a
    kill; and figures.
    """
    verdicts = [match[1] for match in _VERDICT.finditer(text)]
    found: dict[str, Any] = {
        name.lower(): verdicts.count(name) for name in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    lines = text.splitlines()
    failures = [match[1] for match in map(_NAMED.match, lines) if match is not None]
    if failures:
        found["failures"] = failures
    found["printed"] = [
        line.strip()[:300] for line in lines if _PRINTED.search(line) and "::" not in line
    ][:20]
    return found


def last_lines(text: str) -> list[str]:
    """The last lines of a log that say something, each cut at 300 characters."""
    lines = (line.rstrip()[:300] for line in text.splitlines())
    return list(deque((line for line in lines if line), maxlen=LAST_LINES))
