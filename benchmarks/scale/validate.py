"""Holds the model against whole runs of 1, 2 and 4 workers in the lab, over links that no part
was fitted on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from .demand import Demand, Link, Step, seconds
from .lab_machine import LabMachine
from .lab_run import LAYOUTS, LabCluster, Measured
from .model import Layout, predict
from .parts import FITTED, HELD_OUT
from .workload import WORK, draw_rows

WITHIN = 0.15
_STEPS, _DRAWS = 12, 32
_PARTS = {"generate": "rollout", "logprobs": "old_logprobs", "update": "update"}
"""Parts of the model by the nodes of a run that they are."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A run and what was predicted of it."""

    link: str
    layout: str
    measured: float
    predicted: float
    undisturbed: float
    """Predicted for workers with a core each."""
    on_links: float
    """Share of the predicted seconds that links take."""
    slowdown: float
    load: float
    parts: dict[str, tuple[float, float]]
    """Measured and predicted seconds of a part."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def measure(folder: Path, links: Iterable[str], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run all layouts over each of the links, as plain values. ``folder`` is that of the parts."""
    found = []
    for name in links:
        with LabCluster(4, (FITTED | HELD_OUT)[name], folder) as cluster:
            # one worker alone has no link
            for layout in LAYOUTS if name == next(iter(HELD_OUT)) else LAYOUTS[1:]:
                run = cluster.run("training", WORK, layout, _STEPS)
                found.append({"link": name, "layout": layout.name, "run": asdict(run)})
                say(
                    f"{name}: {layout.name}: {run.mean:.2f} s a step, slowdown {run.slowdown:.2f}, "
                    f"load {run.load:.0f}"
                )
    return found


def compare(
    machine: LabMachine, links: Mapping[str, Link], runs: Iterable[Mapping[str, Any]]
) -> list[Compared]:
    """Return each run beside its prediction, those over one link after the other."""
    order = [*HELD_OUT]
    ordered = sorted(runs, key=lambda each: (order.index(each["link"]), each["layout"]))
    return [
        _compare(machine, links, each["link"], each["layout"], Measured(**each["run"]))
        for each in ordered
    ]


def _compare(
    machine: LabMachine, links: Mapping[str, Link], link: str, layout: str, run: Measured
) -> Compared:
    (known,) = (each for each in LAYOUTS if each.name == layout)
    step, raw = mean_step(machine, known), links[link]
    whole, undisturbed = seconds(step, raw, run.slowdown), seconds(step, raw)
    computing = sum(part.compute for part in step.values()) * run.slowdown
    parts = {
        part: (run.node(node), step[part].seconds(raw, run.slowdown))
        for part, node in _PARTS.items()
    }
    shares = {"on_links": 1 - computing / whole, "slowdown": run.slowdown, "load": run.load}
    return Compared(link, layout, run.mean, whole, undisturbed, **shares, parts=parts)


def averaged(runs: Sequence[Compared]) -> Compared:
    """Return the means of runs of one layout over one link."""
    numbers = ("measured", "predicted", "undisturbed", "on_links", "slowdown", "load")
    found = {name: mean(getattr(run, name) for run in runs) for name in numbers}
    pairs = {part: [run.parts[part] for run in runs] for part in runs[0].parts}
    parts = {
        part: (mean(one for one, _ in each), mean(two for _, two in each))
        for part, each in pairs.items()
    }
    return Compared(runs[0].link, runs[0].layout, **found, parts=parts)


def mean_step(machine: LabMachine, layout: Layout) -> Step:
    """Return the mean over draws of rows: which prompts a step has is left to chance."""
    rng, total = np.random.default_rng(0), dict[str, Demand]()
    for _ in range(_DRAWS):
        for name, part in predict(layout, draw_rows(WORK, rng), machine).items():
            total[name] = total.get(name, Demand()) + part
    return {name: part * (1 / _DRAWS) for name, part in total.items()}
