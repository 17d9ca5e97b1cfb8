"""Whole runs in the lab of hosts: one worker a host, the scheduler and the driver on a host of their own."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import mkdtemp

from siirl_dask.testing.hosts import DaskCluster, Lab, Links

from .cores import Threads, since, threads, total
from .model import Layout
from .workload import MINIBATCHES, Size, overrides

ROOT = Path(__file__).resolve().parents[2]
_WARM = 2  # steps that are not counted
_LIMIT = 300.0  # seconds of a run
_POLL = 0.02

LAYOUTS = (
    Layout("1, together", 1, 1, together=True, minibatches=MINIBATCHES),
    Layout("2, together", 2, 2, together=True, minibatches=MINIBATCHES),
    Layout("1 + 1, apart", 1, 1, together=False, minibatches=MINIBATCHES),
    Layout("2 + 2, apart", 2, 2, together=False, minibatches=MINIBATCHES),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's steps after the first ones."""

    seconds: list[float]
    slowdown: float
    """Of the threads that compute, over these steps."""
    used: float
    """Core seconds a step of all workers, all threads."""
    nodes: dict[str, float]
    """Median seconds a step of each node and edge, of the worker that took longest."""
    load: float
    """The machine's load average at the end."""

    @property
    def mean(self) -> float:
        """Return the mean, not the median: the slowdown is a mean over all steps as well."""
        return mean(self.seconds)

    @property
    def undisturbed(self) -> float:
        """Return the seconds of a step on cores of its own, if it does nothing but compute."""
        return self.mean / self.slowdown


def placement(layout: Layout) -> str:
    if layout.together:
        return "{}"
    engines = list(range(layout.engines))
    learners = list(range(layout.engines, layout.workers))
    return f"{{rollout: {engines}, reward: {engines}, policy: {learners}}}"


class LabCluster:
    """A cluster of ``workers`` hosts, for one run after the other."""

    def __init__(self, workers: int, links: Links, folder: Path) -> None:
        self._folder = folder
        self.lab = Lab(workers + 1, links=links)
        if links.bits_per_second is not None:
            self.lab.set_rate(links.bits_per_second)
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": paths, "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}
        hosts, control = self.lab.hosts[:-1], self.lab.hosts[-1]
        self._cluster = DaskCluster(control, hosts, folder, environment=environment)

    def __enter__(self) -> LabCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    def run(self, kind: str, size: Size, layout: Layout, steps: int) -> Measured:
        """Run ``training`` or ``hand_over`` of ``steps`` steps. RuntimeError with its output if it fails."""
        url = Path(mkdtemp(dir=self._folder), "run")
        values = overrides(self._folder, url, size, steps + _WARM, layout.workers, _placement(kind, layout))
        address = f"cluster.address={self._cluster.address}"
        module = ("-m", "benchmarks.scale.lab_driver")
        driver = self._cluster.run(self.lab.hosts[-1], *module, kind, *values, address)
        metrics = url / "metrics.jsonl"
        began, marks = time.monotonic(), []
        for lines in (_WARM, _WARM + steps):
            while driver.poll() is None and _lines(metrics) < lines:
                time.sleep(_POLL)
                if time.monotonic() - began > _LIMIT:
                    driver.kill()
            marks.append(self._threads())
        output, _ = driver.communicate(timeout=60)
        if driver.returncode:
            raise RuntimeError(f"a run in the lab failed:\n{output[-3000:]}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()][_WARM:]
        workers = [since(*pair) for pair in zip(*marks, strict=True)][: layout.workers]
        busiest = total(used[0] for used in workers if used)
        everything = total(cores for used in workers for cores in used)
        named = {name for record in records for name in record["metrics"] if name.startswith("seconds/")}
        nodes = {
            name.removeprefix("seconds/"): median(record["metrics"].get(name) or 0.0 for record in records)
            for name in sorted(named)
        }
        seconds = [record["seconds"] for record in records]
        return Measured(seconds, busiest.slowdown, everything.used / steps, nodes, os.getloadavg()[0])

    def _threads(self) -> list[Threads]:
        return [threads(worker.pid) for worker in self._cluster.workers]


def _placement(kind: str, layout: Layout) -> str:
    if kind == "hand_over" and not layout.together:
        return placement(layout).replace(f"reward: {list(range(layout.engines))}, ", "")
    return placement(layout)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
