"""Memory of a run's scheduler while somebody looks at its page: thousands of tiny steps, and one
viewer all the time.

    python benchmarks/page_memory.py [--minutes 60] [--every 60] [--json FILE] [key=value ...]

The quickstart's task with four rows a step on one worker. The scheduler is in the process of the
driver. The viewer is a Bokeh session in a process of its own: like a browser it gets each change of
the page, and clicks a sample now and then, but it draws nothing. The run is ended when the minutes
are over. Linux.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from bokeh.client import pull_session
from tornado.ioloop import IOLoop, PeriodicCallback

_FIXED = (
    "run.name=page",
    "run.steps=1000000",
    "cluster.workers=1",
    "cluster.placement={}",
    "rollout.engine=transformers",
    "rollout.n=2",
    "data.batch_size=2",
    "algorithm.minibatches=1",
    "validation.every=1000000",
    "checkpoint.every=0",
    "observe.progress=false",
)
_CLICK = 20.0  # seconds between two samples that the viewer clicks
_PATIENCE = 600.0  # seconds for the run to begin


@dataclass(frozen=True, slots=True)
class Look:
    """The process of the driver and the scheduler at one time."""

    minutes: float
    step: int
    rss: float
    """Resident memory, MB."""
    cores: float
    """Processor time since its start, seconds."""
    points: int
    """Points of the reward's curve, as the viewer has them."""
    changes: int
    """Changes of the page that the viewer has had."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--every", type=float, default=60.0, help="seconds between two looks at the process"
    )
    parser.add_argument(
        "--json", type=Path, help="where the looks are written, each as soon as it is there"
    )
    parser.add_argument("--view", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    if given.view:
        return view(given.view)
    looks = list[Look]()
    with TemporaryDirectory() as folder:
        for look in measure(Path(folder), given.minutes, given.every, given.overrides):
            looks.append(look)
            print(look, flush=True)
            if given.json:
                given.json.write_text(json.dumps([asdict(one) for one in looks]))
    print(table(looks))
    return None


def measure(
    folder: Path, minutes: float, every: float, overrides: Sequence[str] = ()
) -> Iterator[Look]:
    """Yield a look at the process every ``every`` seconds, for some minutes from the first step
    on.
    """
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "siirl_dask.cli",
        "quickstart",
        *_FIXED,
        f"observe.dashboard_port={port}",
    ]
    with _process([*command, *overrides], cwd=folder, stdout=subprocess.DEVNULL) as run:
        began = time.monotonic()
        while not step_of(folder):
            if run.poll() is not None or time.monotonic() - began > _PATIENCE:
                raise SystemExit(f"the run has done no step: exit code {run.poll()}")
            time.sleep(1.0)
        address, process = f"http://127.0.0.1:{port}/siirl", psutil.Process(run.pid)
        with _process(
            [sys.executable, __file__, "--view", address], stdout=subprocess.PIPE, text=True
        ) as viewer:
            lines = iter(viewer.stdout)
            next(lines, "")
            began = time.monotonic()
            while (passed := time.monotonic() - began) < 60 * minutes:
                time.sleep(every - passed % every)
                viewer.send_signal(signal.SIGUSR1)
                if not (told := next(lines, "")):
                    raise SystemExit("the viewer has ended: did the run?")
                taken = process.cpu_times()
                rss, cores = process.memory_info().rss / 1e6, taken.user + taken.system
                yield Look(
                    (time.monotonic() - began) / 60, step_of(folder), rss, cores, **json.loads(told)
                )


def view(url: str) -> None:
    """Look at the page, as a browser does, and print what has come so far at each SIGUSR1."""
    changes, asked = 0, list[int]()
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    session, clicked = pull_session(url=url, io_loop=IOLoop.current()), time.monotonic()
    curve, rows = (
        session.document.select_one({"name": name}) for name in ("curve reward", "sample rows")
    )

    def count(event: object) -> None:
        nonlocal changes
        changes += 1

    def act() -> None:
        nonlocal clicked
        if time.monotonic() - clicked > _CLICK and rows.data["step"]:
            clicked = time.monotonic()
            rows.selected.indices = [1 - (rows.selected.indices or [1])[0]]
        if asked:
            asked.clear()
            print(json.dumps({"points": len(curve.data["x"]), "changes": changes}), flush=True)

    session.document.on_change(count)
    PeriodicCallback(act, 100).start()
    print("it is there", flush=True)
    # Bokeh's client nests its calls deeper with each change until its loop ends
    connection = session._connection
    while session.connected:
        connection._loop_until(_some_time_later())


def _some_time_later() -> Callable[[], bool]:
    until = time.monotonic() + 0.2
    return lambda: time.monotonic() > until


def step_of(folder: Path) -> int:
    """Return the newest training step whose metrics are written; 0 before the first."""
    path = folder / "runs" / "page" / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        lines.seek(max(0, path.stat().st_size - 20_000))
        last = [
            line
            for line in lines.read().splitlines()
            if line.startswith(b"{") and line.endswith(b"}")
        ]
    return max((json.loads(line)["step"] for line in last), default=0)


def table(looks: Sequence[Look]) -> str:
    """Return ten or so of the looks as a table for a page."""
    lines = ["| after | steps | resident memory, MB | processor time a step |", "|---|---|---|---|"]
    for one in looks[:: max(1, len(looks) // 10)]:
        cost = one.cores / max(1, one.step) * 1e3
        lines.append(
            f"| {one.minutes:.0f} minutes | {one.step:,} | {one.rss:.0f} | {cost:.0f} ms |"
        )
    return "\n".join(lines)


@contextmanager
def _process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    main()
