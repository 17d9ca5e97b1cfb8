"""Runs the parts of the day on one device, each with a limit of its own, and writes a line for each
at once.

Called by ``first_run.sh`` in the repository's root. In the folder of ``--out`` it leaves
results.jsonl, which page.py reads, summary.txt, all.log and logs.tgz. When it is ended by SIGTERM
or SIGINT, it kills what runs, writes a line for that and for each part that did not begin, and
packs the logs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import results
from parts import GROUPS, TOGETHER, Part, choose
from processes import PATIENCE, Running

WORK = Path("build/gpu-work")
LARGEST_LOG = 15_000_000  # bytes of all.log: what a machine lets out may be bounded
LEAST = 5.0  # seconds that a part must have, or it does not begin
ON_CPU = os.environ.get("SIIRL_TEST_DEVICE") == "cpu"


class CutOffError(Exception):
    """The day was ended from outside."""


class Day:
    """Starts parts, watches them and writes what became of them."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out = out
        self.logs = WORK / "logs"
        self.environment = _environment()
        self._began = time.monotonic()
        self._end = self._began + seconds - PATIENCE
        self._running: list[Running] = []
        self.ended_by: str | None = None
        """Name of the signal that ends the day; None until one comes."""

    def run(self, parts: Sequence[Part]) -> None:
        """Run the parts at once, until all have ended. CutOffError when a signal has come."""
        for part in parts:
            self._begin(part)
        while self._running:
            if self.ended_by is not None:
                raise CutOffError(self.ended_by)
            for running in list(self._running):
                if running.ended():
                    self._running.remove(running)
                    self._write(running.outcome())
            time.sleep(0.1)
        self.pack()

    def cut_off(self, begun: set[str], parts: Sequence[Part]) -> None:
        """Kill what runs, write a line for it, for each part that has not begun and for the day,
        and pack.
        """
        for running in self._running:
            running.kill()
            self._write(running.outcome(cut_off=True))
        self._running.clear()
        for part in parts:
            if part.name not in begun:
                self._write(
                    {"part": part.name, "state": "left out", "why": "the day was cut off before"}
                )
        self.close("cut off")

    def close(self, state: str) -> None:
        """Write the day's own line, which comes last, and pack."""
        self._write(
            {"part": "day", "state": state, "seconds": round(time.monotonic() - self._began, 1)}
        )
        self.pack()

    def pack(self) -> None:
        """Write summary.txt, all.log and logs.tgz of what is there so far."""
        (self.out / "summary.txt").write_text(
            results.summary(results.read(self.out / results.FILE))
        )
        logs = sorted(self.logs.glob("*.log"))
        text = b"".join(f"===== {log.stem}\n".encode() + log.read_bytes() for log in logs)
        (self.out / "all.log").write_bytes(text[-LARGEST_LOG:])
        with tarfile.open(self.out / "logs.tgz", "w:gz") as archive:
            archive.add(self.logs, arcname="logs")

    def _begin(self, part: Part) -> None:
        left = self._end - time.monotonic()
        if left < LEAST:
            self._write({"part": part.name, "state": "left out", "why": "no time was left"})
            return
        log = self.logs / f"{part.name}.log"
        seconds = min(part.seconds, left)
        self._running.append(Running.start(part, self.out, log, self.environment, seconds))

    def _write(self, line: dict[str, object]) -> None:
        results.append(self.out, **line)
        print(results.summary([line]), end="", flush=True)


def _environment() -> dict[str, str]:
    """Variables of parts: no network, one thread for each of many processes, no GPU in a
    rehearsal.
    """
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ON_CPU:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _run_all(day: Day, parts: Sequence[Part]) -> int:
    """Run group after group; the exit code."""
    begun: set[str] = set()
    try:
        for group in GROUPS:
            members = [part for part in parts if part.group == group]
            batches = [members] if group in TOGETHER else [[part] for part in members]
            for batch in filter(None, batches):
                begun.update(part.name for part in batch)
                day.run(batch)
    except CutOffError as cut:
        day.cut_off(begun, parts)
        print(f"ended by {cut}; what there is lies in {day.out}", file=sys.stderr)
        return 143
    day.close("ended")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the results; lines are added to those there",
    )
    parser.add_argument("--only", default="", help="groups or parts, separated by spaces (all)")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it (560)")
    options = parser.parse_args()
    try:
        parts = choose(options.only)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    day = Day(options.out.resolve(), options.seconds)
    day.logs.mkdir(parents=True, exist_ok=True)

    def end(number: int, frame: FrameType | None) -> None:
        day.ended_by = signal.Signals(
            number
        ).name  # and nothing else: a part may be starting at this moment

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return _run_all(day, parts)


if __name__ == "__main__":
    sys.exit(main())
