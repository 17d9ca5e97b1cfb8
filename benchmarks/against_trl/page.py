"""The comparison as a page of documentation: text, plot and the numbers themselves."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, TypedDict

import psutil

from .plot import plot_curves
from .runs import OURS, SIDES, TOLD, TRL
from .texts import ALIKE, CURVES, INTRODUCTION, LOSSES, NOT_ALIKE, SPEED

_PACKAGES = (
    "siirl_dask",
    "trl",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "dask",
    "distributed",
)
_LAST = 10  # steps that stand for the end of a run
QUIET = 1.5  # load beyond which times are not to be trusted
_MANY = 20  # samples per second that need no decimals
_LAYOUTS = {
    "speed": "one worker, one core",
    "speed of 2 workers": "two workers that do everything, two cores",
    "speed of 4 workers": "two workers that generate and two that learn, two cores",
}
"""Parts with samples per second, and what they are of."""


class Measured(TypedDict):
    """A part, and under what circumstances it was measured."""

    found: dict[str, Any]
    command: str
    machine: str
    versions: str
    day: str
    load: float
    """Load average of the machine over one minute, at the time of the measurement."""


def measured_now(command: str, found: dict[str, Any]) -> Measured:
    return Measured(
        found=found,
        command=command,
        machine=_machine(),
        versions=(
            f"Python {platform.python_version()}, "
            f"{', '.join(f'{name} {version(name)}' for name in _PACKAGES)}"
        ),
        day=f"{date.today():%d %B %Y}",
        load=os.getloadavg()[0],
    )


def write_page(out: Path, record: Path, parts: Mapping[str, Measured]) -> None:
    """Write the page ``out`` with its ``.png``, and the raw ``record``. Parts that were never
    measured are left out.
    """
    for place in (out.parent, record.parent):
        place.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(parts, indent=1) + "\n")
    blocks = [INTRODUCTION, "\n".join(f"* {line}" for line in summary(parts))]
    if "losses" in parts:
        found = parts["losses"]["found"]
        blocks += [
            "## One update",
            LOSSES.format(**found),
            _loss_table(found),
            _advantages(found),
            how(parts["losses"]),
        ]
    if "curves" in parts:
        picture = out.with_suffix(".png")
        plot_curves(picture, parts["curves"]["found"])
        blocks += ["## Whole runs", CURVES, f"![Rewards and entropy of both]({picture.name})"]
        blocks += [_curve_table(parts["curves"]["found"]), ALIKE, NOT_ALIKE, how(parts["curves"])]
    for at, (name, part) in enumerate(_speeds(parts)):
        blocks += [*(["## Samples per second", SPEED] if not at else []), f"### {_LAYOUTS[name]}"]
        blocks += [speed_table(part["found"]), how(part)]
    out.write_text("\n\n".join(block.strip("\n") for block in blocks) + "\n")


def summary(parts: Mapping[str, Measured]) -> Iterator[str]:
    """A line a part."""
    if "losses" in parts:
        cases = parts["losses"]["found"]["cases"]
        same = [case for case in cases if not case["differs"]]
        loss, gradient = (
            max(case[f"{what}_apart"] for case in same) for what in ("loss", "gradient")
        )
        yield (
            f"{sum(case['equal'] for case in same)} of {len(same)} loss configurations that both "
            f"have are equal (loss within {loss:.0e}, gradient within {gradient:.0e}, relatively); "
            f"{len(cases) - len(same)} are defined otherwise"
        )
    if "curves" in parts:
        found = parts["curves"]["found"]
        shown = [kind for kind in (*SIDES, TOLD) if kind in found]
        ends = (f"{kind} {mean(run['accuracy'][-1] for run in found[kind]):.3f}" for kind in shown)
        before = mean(run["accuracy"][0] for run in found[OURS])
        yield (
            f"validation accuracy, from {before:.3f}: {', '.join(ends)}, means of "
            f"{len(found[OURS])} seeds"
        )
    for name, part in _speeds(parts):
        found = part["found"]
        ours, trl = (found["medians"][side] for side in SIDES)
        loud = max(found["loads"])
        trust = (
            f"; other things were running (load {loud:.1f}): not to be trusted"
            if loud > QUIET
            else ""
        )
        rates = f"ours {ours:.0f}, trl {trl:.0f}, ratio {found['ratio']:.2f}"
        if (told := found["medians"].get(TOLD)) is not None:
            rates += f"; {TOLD} {told:.0f}, ratio {told / trl:.2f}"
        yield f"samples per second, {_LAYOUTS[name]}: {rates}{trust}"


def _speeds(parts: Mapping[str, Measured]) -> list[tuple[str, Measured]]:
    return [(name, parts[name]) for name in _LAYOUTS if name in parts]


def _loss_table(found: Mapping[str, Any]) -> str:
    rows = [["TRL's", "ours", "loss, ours", "loss, TRL's", "loss apart", "gradient apart", "equal"]]
    for case in found["cases"]:
        numbers = [f"{case['loss']:+.8f}", f"{case['loss_trl']:+.8f}"]
        apart = [f"{case['loss_apart']:.1e}", f"{case['gradient_apart']:.1e}"]
        verdict = "yes" if case["equal"] else f"no: {case['differs'] or 'and it should be'}"
        rows.append([case["case"], case["ours"], *numbers, *apart, verdict])
    return markdown(rows)


def _advantages(found: Mapping[str, Any]) -> str:
    apart = found["advantages"]
    return (
        "Advantages of the same rewards, how far apart relatively: without the standard deviation "
        f"(`dr_grpo`, TRL's `scale_rewards=none`) {apart['dr_grpo']:.0e}; with it (`grpo`, TRL's "
        f"`group`) {apart['grpo']:.0e}, because TRL adds 1e-4 to it and this package 1e-6; with "
        f"1e-4 here as well {apart['grpo_with_trls_epsilon']:.0e}."
    )


def _curve_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = [
        [
            "run",
            "accuracy before",
            "after",
            f"reward, last {_LAST}",
            f"entropy, first {_LAST}",
            f"last {_LAST}",
        ]
    ]
    for kind, runs in found.items():
        for at, run in enumerate(runs, start=1):
            numbers = [*run["accuracy"], mean(run["rewards"][-_LAST:])]
            numbers += [mean(run["entropy"][:_LAST]), mean(run["entropy"][-_LAST:])]
            rows.append([f"{kind}: run {at}", *(f"{number:.3f}" for number in numbers)])
    return markdown(rows)


def speed_table(found: Mapping[str, Any]) -> str:
    """Return samples per second of each round and kind of run, and what each of ours is of
    TRL's.
    """
    rounds, medians = found["samples_per_second"], found["medians"]
    ours = [kind for kind in rounds if kind != TRL]
    rows = [["round", *rounds, *(f"{kind} / trl" for kind in ours), "load before"]]
    for at, load in enumerate(found["loads"]):
        rates = {kind: rounds[kind][at] for kind in rounds}
        rows.append([str(at + 1), *_rates(rates, ours), f"{load:.1f}"])
    return markdown([*rows, ["**median**", *(f"**{each}**" for each in _rates(medians, ours)), ""]])


def _rates(rates: Mapping[str, float], ours: Sequence[str]) -> list[str]:
    """Return samples per second of each kind of run, and the ratios of ours to TRL's."""
    digits = 0 if min(rates.values()) >= _MANY else 2
    return [
        *(f"{rate:.{digits}f}" for rate in rates.values()),
        *(f"{rates[kind] / rates[TRL]:.2f}" for kind in ours),
    ]


def how(part: Measured) -> str:
    """Return under what circumstances a part was measured, and the command that does it again."""
    circumstances = (
        f"Measured on {part['day']} on {part['machine']}, load {part['load']:.1f} at the end; "
        f"{part['versions']}."
    )
    return f"{circumstances} To repeat it:\n\n    {part['command']}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    heading, *rows = lines
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rows))


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line] or [
        platform.machine()
    ]
    return (
        f"{psutil.cpu_count()} cores ({names[0]}), {memory:.0f} GiB of memory, {platform.system()}"
    )
