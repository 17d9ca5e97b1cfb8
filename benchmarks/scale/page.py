"""The model's page of documentation: what was fitted, what whole runs took, the paper's figures,
and a plot.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .lab_machine import LabMachine, TransferCost
from .paper import CONTEXTS, DEVICES, SEEDS
from .parts import FITTED, HELD_OUT
from .validate import WITHIN, Compared, averaged

BY_HAND = "## What agrees and what does not"  # from here on the page is written by hand, and stays
_WAYS = ("driver, 0.5 GB/s", "padded", "padded; driver, 0.5 GB/s")
"""Baselines that the plot has."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73")


def page(results: Mapping[str, Any], machine: LabMachine, compared: Sequence[Compared]) -> str:
    """Return the page down to what is written by hand."""
    parts, runs, paper = (results[stage] for stage in ("parts", "runs", "paper"))
    measured = ", ".join(
        f"{name} on {stage['date']}" for name, stage in (("Parts", parts), ("runs", runs))
    )
    return "\n\n".join(
        [
            "# A step by a model: fitted on parts, held against runs, asked about 1,024 devices",
            _INTRODUCTION,
            f"{measured}; {os.cpu_count()} cores ({platform.machine()}), shared with other work. "
            "To repeat it:",
            "    python benchmarks/scale_model.py",
            f"## Parts\n\n{_PARTS}\n\n{_parts(machine)}\n\n{_links(parts['links'])}",
            "## Against whole "
            f"runs\n\n{_RUNS}\n\n{_verdict(compared)}\n\n{_runs(compared)}\n\n{_PHASES}\n\n"
            f"{_phases(compared)}",
            f"## The paper's figures\n\n{_PAPER}\n\n![Throughput by devices, and beside "
            "baselines](scale_model.png)",
            "### Throughput of a device, of that on the "
            f"fewest\n\n{_EFFICIENCY}\n\n{_efficiency(paper['efficiency'])}",
            f"### The same with other constants\n\n{_otherwise(paper['otherwise'])}",
            f"### Seconds of a step\n\n{_seconds(paper['parts'])}",
            "### Our throughput over that of a baseline, by "
            f"devices\n\n{_BASELINES}\n\n{_devices(paper['devices'])}",
            f"### The same by context, 7B on 64 devices\n\n{_context(paper['context'])}",
        ]
    )


_INTRODUCTION = """\
The step is GRPO's. Each part asks for seconds of a core or device, for bytes on a link and for round trips
(`benchmarks/scale/demand.py`); the parts come one after the other. Which worker learns from which row is decided by the
code that decides it in a run (`siirl_dask.coordinator.layout`); the same function predicts two cores in a lab and a
thousand devices, with other parts."""
_PARTS = """\
Each is measured by itself in the lab of hosts (`siirl_dask.testing.hosts`), with a model of 12.8 million parameters in
float32. Engine and trainer: core seconds of one process, over several numbers of rows and tokens; a prompt counts once
for those of its samples that are on one worker, since both compute it once. Sums of gradients: gloo between two hosts.
Hand-over: runs that do nothing else, with this model and a tiny one; the difference is what
bytes take. A step without work: runs with the tiny model and responses of one token, less what engine and trainer take
for these. Core seconds are the kernel's count, at the pace of a quiet core: neighbours and clocks make the same work
take up to 1.7 times as long from one minute to the next, so that work which never changes is timed beside each
measurement (`benchmarks/scale/pace.py`). Round trips are what a link of 30 ms adds, windows of TCP that are full
included: what is on its way over a far link is bounded, so that many bytes take many round trips."""
_RUNS = """\
Runs of 1, 2 and 4 workers, a host each, scheduler and driver on one more; rows of 16 tokens and log-normal responses.
No part was measured on these links, only one raw TCP stream and the round trip, as anybody would measure a network
that he asks about. The machine has fewer cores than the lab has hosts, and does other work as well: *slowdown* is how
long a second of computing took, by the kernel's count of how long the threads that compute waited for a core, and by
the core's pace between steps. It is measured in the run and given to the model; *undisturbed* is the prediction for a
quiet core to each worker. Shown is the half of each run's steps in which it was least. *Links* is the predicted share
of links. Each line is the mean of runs with processes and connections of their own: over a far link a sum of
gradients takes 36 to 45 round trips, by the connection."""
_PHASES = """\
The same error for the parts that a run's metrics tell by themselves, over the runs of each layout; sums of gradients
are in *update*. Where they cancel, the whole is nearer than its parts."""
_PAPER = """\
DistFlow (arXiv:2507.13833) drawn with the same model. Constants are of an H100's data sheet and of habit
(`benchmarks/scale/devices.py`): none is fitted to the paper, and none was measured on such a device. Engines have as
many rows at once as their cache has room for; learners are FSDP over all devices. Engine, trainer and network are
therefore assumptions; the layout of rows and the exchange of statistics are the code's own. Ranges are over
"""
_PAPER += f"{len(SEEDS)} seeds of lengths: log-normal, sigma 0.8, median a quarter of the longest."
_EFFICIENCY = "Tokens a second and device; prompts of 1,024 tokens, responses of at most 4,096."
_BASELINES = """\
Each line changes one thing, or two: all rows padded and through one process, three times a step, at the rates that
verl's DataProto has in [dataplane.md](dataplane.md) (0.5 GB/s with numpy, 0.1 GB/s by default); learners that compute
on padding; learners that take rows in order instead of balanced. 64 rows a device. Everything else is ours."""


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _parts(machine: LabMachine) -> str:
    engine, trainer = machine.engine, machine.trainer
    lines = [
        ("engine, a batch", f"{engine.batch * 1e3:.1f} ms"),
        ("engine, a token of a prompt", f"{engine.prompt_token * 1e3:.3f} ms"),
        ("engine, a token of the longest row", f"{engine.step * 1e3:.2f} ms"),
        ("engine, the same for each row", f"{engine.row_step * 1e3:.3f} ms"),
        ("log-probs, a pass", f"{trainer.logprobs * 1e3:.1f} ms"),
        ("log-probs, a token", f"{trainer.logprobs_token * 1e3:.3f} ms"),
        ("update, a mini-batch", f"{trainer.update * 1e3:.1f} ms"),
        ("update, a token", f"{trainer.update_token * 1e3:.3f} ms"),
        ("sum of gradients", _transfer(machine.sums)),
        ("weights, made and loaded", f"{machine.copy_byte * 1e9:.2f} core s/GB"),
        ("weights, between hosts", _transfer(machine.stream)),
        *(
            (
                f"a step without work, {name}",
                f"{cost.compute * 1e3:.0f} ms, {cost.trips:.1f} round trips",
            )
            for name, cost in machine.steps.items()
        ),
    ]
    return _table(("part", "takes"), lines)


def _transfer(cost: TransferCost) -> str:
    return f"{cost.byte * 1e9:.2f} core s/GB, {cost.trips:.1f} round trips"


def _links(links: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        (
            name,
            f"{links[name]['rate'] / 1e6:,.0f} MB/s",
            f"{links[name]['round_trip'] * 1e3:.2f} ms",
            use,
        )
        for use, named in (("parts", FITTED), ("runs", HELD_OUT))
        for name in named
    ]
    return _table(("link", "one raw TCP stream", "round trip", "for"), lines)


def _verdict(compared: Sequence[Compared]) -> str:
    means = [averaged(runs) for runs in _cases(compared)]
    outside = [each for each in means if abs(each.error) > WITHIN]
    text = f"{len(means) - len(outside)} of {len(means)} are within {WITHIN:.0%}"
    if outside:
        named = (f"{each.layout} over {each.link} ({each.error:+.1%})" for each in outside)
        text += f"; not {', '.join(named)}"
    single = sum(abs(each.error) <= WITHIN for each in compared)
    return f"{text}. Of the {len(compared)} runs themselves {single} are."


def _cases(compared: Sequence[Compared]) -> list[list[Compared]]:
    """Return the runs of each layout over each link."""
    cases: dict[tuple[str, str], list[Compared]] = {}
    for each in compared:
        cases.setdefault((each.link, each.layout), []).append(each)
    return [*cases.values()]


def _runs(compared: Sequence[Compared]) -> str:
    header = ("workers", "link", "measured s", "predicted s", "error", "of each run", "links", "slowdown",
              "undisturbed s", "load")  # fmt: skip
    lines = []
    for runs in _cases(compared):
        each, errors = averaged(runs), ", ".join(f"{run.error:+.0%}" for run in runs)
        lines.append((
            *(each.layout, each.link, f"{each.measured:.2f}", f"{each.predicted:.2f}", f"{each.error:+.0%}", errors),
            *(f"{each.on_links:.0%}", f"{each.slowdown:.1f}", f"{each.undisturbed:.2f}", f"{each.load:.0f}"),
        ))  # fmt: skip
    return _table(header, lines)


def _phases(compared: Sequence[Compared]) -> str:
    names = tuple(compared[0].parts)
    lines = []
    for layout in dict.fromkeys(each.layout for each in compared):
        runs = [each.parts for each in compared if each.layout == layout]
        lines.append((layout, *(_errors([run[name] for run in runs]) for name in names)))
    return _table(("workers", *names), lines)


def _errors(pairs: Sequence[tuple[float, float]]) -> str:
    errors = [predicted / measured - 1 for measured, predicted in pairs]
    return f"{min(errors):+.0%} to {max(errors):+.0%}" if len(errors) > 1 else f"{errors[0]:+.0%}"


def _range(values: Sequence[float], form: str) -> str:
    low, _, high = (format(value, form) for value in values)
    return low if low == high else f"{low} to {high}"


def _efficiency(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    tables = []
    for model, devices in DEVICES.items():
        header = (model, *(f"{count:,}" for count in devices[1:]))
        own = {
            name.removeprefix(f"{model}, "): ranges
            for name, ranges in found.items()
            if name.startswith(model)
        }
        tables.append(
            _table(
                header,
                (
                    (name, *(_range(each, ".1%") for each in ranges[1:]))
                    for name, ranges in own.items()
                ),
            )
        )
    return "\n\n".join(tables)


def _otherwise(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    header = (
        "64 rows a device",
        *(f"{model}, {devices[-1]:,} of {devices[0]}" for model, devices in DEVICES.items()),
    )
    return _table(
        header,
        ((name, *(_range(each, ".1%") for each in ranges)) for name, ranges in found.items()),
    )


def _seconds(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    cases = [
        (model, devices, parts) for model, by in found.items() for devices, parts in by.items()
    ]
    names = tuple(cases[0][2])
    lines = [
        (f"{model} on {int(devices):,}", *(f"{parts[name]:.1f}" for name in names))
        for model, devices, parts in cases
    ]
    return "64 rows a device, means over seeds.\n\n" + _table(("", *names), lines)


def _devices(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    tables = []
    for model, devices in DEVICES.items():
        own = {
            name.removeprefix(f"{model}, "): ranges
            for name, ranges in found.items()
            if name.startswith(model)
        }
        header = (model, *(f"{count:,}" for count in devices))
        tables.append(
            _table(
                header,
                ((name, *(_range(each, ".2f") for each in ranges)) for name, ranges in own.items()),
            )
        )
    return "\n\n".join(tables)


def _context(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    header = ("", *(f"{context // 1024}k" for context in CONTEXTS))
    return _table(
        header,
        ((name, *(_range(each, ".2f") for each in ranges)) for name, ranges in found.items()),
    )


def draw(paper: Mapping[str, Any], path: Path) -> None:
    """Draw efficiency by devices, and our throughput over that of baselines by devices and by
    context.
    """
    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for colour, (model, devices) in zip(_COLOURS, DEVICES.items(), strict=False):
        _band(
            first,
            devices,
            paper["efficiency"][f"{model}, 64 rows a device"],
            f"{model}, 64 rows a device",
            colour,
        )
    for colour, way in zip(_COLOURS, _WAYS, strict=True):
        _band(second, DEVICES["7B"], paper["devices"][f"7B, {way}"], way, colour)
        _band(third, CONTEXTS, paper["context"][f"16 rows a device, {way}"], way, colour)
    labels = ("devices", "devices, 7B, 64 rows each", "context, 7B, 64 devices, 16 rows each")
    for axes, label in zip((first, second, third), labels, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.legend(fontsize="small")
    first.set_ylim(0, 1.1)
    first.set_ylabel("throughput a device, of the fewest")
    second.set_ylabel("ours over a baseline's")
    figure.savefig(path)


def _band(
    axes: Any, places: Sequence[int], ranges: Sequence[Sequence[float]], label: str, colour: str
) -> None:
    low, middle, high = zip(*ranges, strict=True)
    axes.plot(places, middle, color=colour, label=label, marker="o", markersize=3)
    axes.fill_between(places, low, high, color=colour, alpha=0.3)
