"""Whole runs in the lab of hosts: one worker a host, the scheduler and the driver on a host of
their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp

from siirl_dask.testing.hosts import DaskCluster, Lab, Links

from .cores import Cores, since, threads, total
from .model import Layout
from .pace import pace
from .workload import MINIBATCHES, Size, overrides

ROOT = Path(__file__).resolve().parents[2]
_WARM = 2  # steps that are not counted
_LIMIT = 300.0  # seconds of a run
_POLL = 0.02
NODES = ("rollout", "old_logprobs", "update")
"""Nodes that only compute, or compute and sum gradients: the seconds of others are of waiting
for peers as well."""

LAYOUTS = (
    Layout("1, together", 1, 1, together=True, minibatches=MINIBATCHES),
    Layout("2, together", 2, 2, together=True, minibatches=MINIBATCHES),
    Layout("1 + 1, apart", 1, 1, together=False, minibatches=MINIBATCHES),
    Layout("2 + 2, apart", 2, 2, together=False, minibatches=MINIBATCHES),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's steps after the first ones, and what the machine did meanwhile."""

    steps: list[float]
    """Seconds of each."""
    slowdowns: list[float]
    """How long a second of computing took in each step: waiting for a core, and the core's own
    pace."""
    used: float
    """Core seconds a step of all workers, all threads, at the pace of a quiet core."""
    nodes: list[dict[str, float]]
    """Seconds of each of ``NODES``, of the worker that took longest, in each step."""
    load: float
    """The machine's load average at the end."""

    @property
    def quiet(self) -> list[int]:
        """Return the half of the steps in which computing took least long; by what is known
        before any prediction.
        """
        order = sorted(range(len(self.steps)), key=lambda step: self.slowdowns[step])
        return order[: max(1, len(order) // 2)]

    @property
    def mean(self) -> float:
        """Return the mean seconds of the quiet steps."""
        return mean(self.steps[step] for step in self.quiet)

    @property
    def slowdown(self) -> float:
        return mean(self.slowdowns[step] for step in self.quiet)

    @property
    def undisturbed(self) -> float:
        """Return the seconds of a step on cores of its own, if it does nothing but compute."""
        return mean(self.steps[step] / self.slowdowns[step] for step in self.quiet)

    def node(self, name: str) -> float:
        return mean(self.nodes[step].get(name, 0.0) for step in self.quiet)


def placement(layout: Layout, kind: str) -> str:
    """Return the roles' workers for a run of this kind."""
    if layout.together:
        return "{}"
    engines = list(range(layout.engines))
    learners = list(range(layout.engines, layout.workers))
    reward = f"reward: {engines}, " if kind == "training" else ""
    return f"{{rollout: {engines}, {reward}policy: {learners}}}"


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
        self._driver = self._cluster.run(
            control, "-m", "benchmarks.scale.lab_driver", stdin=subprocess.PIPE
        )

    def __enter__(self) -> LabCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    def run(self, kind: str, size: Size, layout: Layout, steps: int) -> Measured:
        """Run ``training`` or ``hand_over`` of ``steps`` steps. RuntimeError with its output if
        it fails.
        """
        url = Path(mkdtemp(dir=self._folder), "run")
        values = overrides(
            self._folder, url, size, steps + _WARM, layout.workers, placement(layout, kind)
        )
        stdin, stdout = self._driver.stdin, self._driver.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([kind, *values, f"cluster.address={self._cluster.address}"]) + "\n")
        stdin.flush()
        metrics, marks, paces = url / "metrics.jsonl", [], []
        late = time.monotonic() + _LIMIT
        for lines in range(_WARM, _WARM + steps + 1):
            while self._driver.poll() is None and _lines(metrics) < lines:
                time.sleep(_POLL)
                if time.monotonic() > late:
                    self._driver.kill()
            marks.append(
                [threads(worker.pid) for worker in self._cluster.workers[: layout.workers]]
            )
            paces.append(pace())
        printed = ""
        while (line := stdout.readline()) != "done\n":
            printed += line
            if not line:
                raise RuntimeError(f"a run in the lab failed:\n{printed[-3000:]}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()][_WARM:]
        passed, pace_of = (
            [_passed(*pair) for pair in pairwise(marks)],
            [mean(pair) for pair in pairwise(paces)],
        )
        metrics_of = [record["metrics"] for record in records]
        nodes = [
            {name: each.get(f"seconds/{name}") or 0.0 for name in NODES} for each in metrics_of
        ]
        return Measured(
            steps=[record["seconds"] for record in records],
            slowdowns=[
                busiest.slowdown * each for (busiest, _), each in zip(passed, pace_of, strict=True)
            ],
            used=mean(used / each for (_, used), each in zip(passed, pace_of, strict=True)),
            nodes=nodes,
            load=os.getloadavg()[0],
        )


def _passed(before: list[dict[str, Cores]], after: list[dict[str, Cores]]) -> tuple[Cores, float]:
    """Return what the busiest thread of each worker used and waited for, and the core seconds of
    all threads.
    """
    workers = [since(*pair) for pair in zip(before, after, strict=True)]
    return total(each[0] for each in workers if each), total(
        cores for each in workers for cores in each
    ).used


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
