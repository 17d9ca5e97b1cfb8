"""Measures the parts of a step one by one, over links without a limit and with 30 ms of delay.

Core seconds are those that the kernel counts, so that other work on the machine does not add to
them. Round trips are what a link with delay adds beyond core seconds and bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from siirl_dask.models.broken_imports import hide
from siirl_dask.testing.hosts import Lab, Links

from .demand import Link
from .lab_machine import EngineCost, LabMachine, StepCost, TrainerCost, TransferCost
from .lab_run import LAYOUTS, ROOT, LabCluster, Measured
from .model import Layout, predict
from .workload import EMPTY, WORK, Size, draw_rows, make_data, make_model

FAST, FAR = "no limit", "30 ms"
FITTED = {FAST: Links(), FAR: Links(delay=30e-3)}
"""Links on which the parts are measured."""
HELD_OUT = {
    "1 Gbit/s": Links(bits_per_second=1e9),
    "200 Mbit/s": Links(bits_per_second=200e6),
    "1 ms": Links(delay=1e-3),
    "10 ms": Links(delay=10e-3),
}
"""Links on which no part is measured but the raw stream and the round trip."""
_ALONE, _APART = LAYOUTS[0], LAYOUTS[2]
_STEPS, _SUMS, _CONNECTIONS = 12, 4, 6


@dataclass(frozen=True, slots=True)
class GlooSum:
    """A sum of gradients of two workers: its seconds, and core seconds of one of them."""

    seconds: float
    used: float


def prepare(folder: Path) -> int:
    """Write models and data for the runs, and return the bytes of the larger model."""
    sizes = {}
    for size in (EMPTY, WORK):
        sizes[size] = make_model(folder / size.name, size)
        make_data(folder / f"{size.name}.parquet", size)
    return sizes[WORK]


def raw_link(links: Links) -> Link:
    """Return the rate of one TCP stream and the round trip between two hosts."""
    with _lab(2, links) as lab:
        first, second = lab.hosts
        program = str(Path(__file__).with_name("raw_link.py"))
        receiver = second.start(
            sys.executable, program, "receive", second.address, stdout=subprocess.PIPE
        )
        assert receiver.stdout is not None
        receiver.stdout.readline()
        return Link(
            **json.loads(first.run(sys.executable, program, "send", second.address, timeout=120))
        )


def gloo_sum(links: Links, size: int) -> GlooSum:
    """Return what a sum of gradients of ``size`` bytes takes of two workers, on average over
    connections: on a far link the same bytes take 36 to 45 round trips, by the connection.
    """
    found = [_gloo_sum(links, size) for _ in range(_CONNECTIONS)]
    return GlooSum(mean(one.seconds for one in found), mean(one.used for one in found))


def _gloo_sum(links: Links, size: int) -> GlooSum:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with _lab(2, links) as lab:
        address = lab.hosts[0].address
        ranks = [
            host.start(
                *(sys.executable, "-m", "benchmarks.scale.gloo_sum", rank, 2, address, size, _SUMS),
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(lab.hosts)
        ]
        return GlooSum(**json.loads(ranks[0].communicate(timeout=180)[0]))


def _lab(hosts: int, links: Links) -> Lab:
    lab = Lab(hosts, links=links)
    if links.bits_per_second is not None:
        lab.set_rate(links.bits_per_second)
    return lab


def measure(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return everything that is measured, as plain values, for ``fit``."""
    hide()
    from .compute import measure_engine, measure_trainer  # imports torch: after hide

    weights = prepare(folder)
    compute = {}
    for size in (EMPTY, WORK):
        model = folder / size.name
        compute[size.name] = {
            "engine": asdict(measure_engine(model)),
            "trainer": asdict(measure_trainer(model)),
        }
        say(f"{size.name}: {compute[size.name]}")
    links, sums = {}, {}
    for name, link in (FITTED | HELD_OUT).items():
        links[name] = asdict(raw_link(link))
        say(f"{name}: {links[name]}")
    for name, link in FITTED.items():
        sums[name] = asdict(gloo_sum(link, weights))
        say(f"{name}: sum of gradients {sums[name]}")
    runs: dict[str, Any] = {}
    for name in FITTED:
        runs[name] = {}
        with LabCluster(4, FITTED[name], folder) as cluster:
            for kind, size, layout in _runs_on(name):
                found = cluster.run(kind, size, layout, _STEPS)
                runs[name][f"{kind} {size.name} {layout.name}"] = asdict(found)
                say(
                    f"{name}: {kind} {size.name} {layout.name}: {found.mean:.3f} s, slowdown "
                    f"{found.slowdown:.2f}"
                )
    return {"weights": weights, "compute": compute, "links": links, "sums": sums, "runs": runs}


def _runs_on(link: str) -> list[tuple[str, Size, Layout]]:
    """Return the small runs on a link: steps without work in all layouts, and hand-overs of
    weights.
    """
    layouts = LAYOUTS if link == FAST else [layout for layout in LAYOUTS if layout.workers > 1]
    moved = (_APART, _ALONE) if link == FAST else (_APART,)
    return [
        *(("training", EMPTY, layout) for layout in layouts),
        *(("hand_over", size, layout) for layout in moved for size in (EMPTY, WORK)),
    ]


def model_links(measured: Mapping[str, Any]) -> dict[str, Link]:
    """Return the links for the model: the rate of one that is limited, and else none.

    How many bytes are on their way over a far link, a window limits: twice as far is half as fast.
    So what they take there is counted in round trips, by the part that sends them, and what they
    take of a core in core seconds.
    """
    limited = {
        name for name, links in (FITTED | HELD_OUT).items() if links.bits_per_second is not None
    }
    return {
        name: Link(link["rate"] if name in limited else inf, link["round_trip"])
        for name, link in measured["links"].items()
    }


def fit(measured: Mapping[str, Any]) -> LabMachine:
    """Return the machine that the measured parts make."""
    runs = {
        link: {name: Measured(**run) for name, run in found.items()}
        for link, found in measured["runs"].items()
    }
    links = model_links(measured)
    weights, compute = measured["weights"], measured["compute"]
    sums = {name: GlooSum(**found) for name, found in measured["sums"].items()}
    alone = _difference(runs[FAST], _ALONE) / weights  # made and loaded in one process
    machine = LabMachine(
        weights=weights,
        engine=EngineCost(**compute[WORK.name]["engine"]),
        trainer=TrainerCost(**compute[WORK.name]["trainer"]),
        sums=_fit_sums(sums, links, weights),
        stream=_fit_stream(runs, links, weights, alone),
        copy_byte=alone,
        steps={},
    )
    small = LabMachine(
        weights=0,
        engine=EngineCost(**compute[EMPTY.name]["engine"]),
        trainer=TrainerCost(**compute[EMPTY.name]["trainer"]),
        sums=TransferCost(0.0, 0.0),
        stream=TransferCost(0.0, 0.0),
        copy_byte=0.0,
        steps={layout.name: StepCost(0.0, 0.0) for layout in LAYOUTS},
    )
    machine.steps.update({layout.name: _fit_step(layout, runs, links, small) for layout in LAYOUTS})
    return machine


def _difference(runs: Mapping[str, Measured], layout: Layout) -> float:
    """Return the core seconds that the weights of the larger model add to a hand-over, at both
    ends.
    """
    empty, work = (runs[f"hand_over {size.name} {layout.name}"] for size in (EMPTY, WORK))
    return max(0.0, work.used - empty.used)


def _fit_sums(sums: Mapping[str, GlooSum], links: Mapping[str, Link], weights: int) -> TransferCost:
    """Fit core seconds a byte where the link is no limit, and the round trips of a sum where it
    is far.
    """
    used = min(found.used for found in sums.values())
    far, link = sums[FAR], links[FAR]
    trips = (far.seconds - far.used) / link.round_trip
    return TransferCost(byte=used / weights, trips=max(0.0, trips))


def _fit_stream(
    runs: Mapping[str, Mapping[str, Measured]],
    links: Mapping[str, Link],
    weights: int,
    alone: float,
) -> TransferCost:
    byte = max(0.0, _difference(runs[FAST], _APART) / weights - alone)
    empty, work = (runs[FAR][f"hand_over {size.name} {_APART.name}"] for size in (EMPTY, WORK))
    link = links[FAR]
    computing = (byte + alone) * weights * work.slowdown
    trips = (work.mean - empty.mean - computing) / link.round_trip
    return TransferCost(byte=byte, trips=max(0.0, trips))


def _fit_step(
    layout: Layout,
    runs: Mapping[str, Mapping[str, Measured]],
    links: Mapping[str, Link],
    small: LabMachine,
) -> StepCost:
    """Fit a step without work: what is left beyond engine and trainer, and the round trips where
    the link is far.
    """
    known = sum(
        part.compute
        for part in predict(layout, draw_rows(EMPTY, np.random.default_rng(0)), small).values()
    )
    near = runs[FAST][f"training {EMPTY.name} {layout.name}"]
    compute = max(0.0, near.undisturbed - known)
    if layout.workers == 1:
        return StepCost(compute, trips=0.0)
    far = runs[FAR][f"training {EMPTY.name} {layout.name}"]
    trips = (far.mean - (compute + known) * far.slowdown) / links[FAR].round_trip
    return StepCost(compute, max(0.0, trips))
