"""Turns a run's records into curves over steps, for pages and reports: plain lists, whatever draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from siirl_dask.observe.agents import agents_with
from siirl_dask.observe.metrics import Record
from siirl_dask.planner import Phase


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of a phase, as it is drawn."""

    metric: str
    label: str = ""
    """Its name in a legend; empty: the metric's own."""
    phase: Phase = Phase.TRAIN
    spread: str = ""
    """Metric with its standard deviation; empty: none."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share axes."""

    title: str
    lines: tuple[Line, ...]


PANELS = (
    Panel("reward", (Line("reward/mean", "mean", spread="reward/std"),)),
    Panel(
        "validation",
        (Line("reward/mean", "validation", Phase.VALIDATION), Line("reward/mean", "test", Phase.TEST)),
    ),
    Panel("entropy, nats a token", (Line("policy/entropy", "policy"),)),
    Panel(
        "KL divergence",
        (
            Line("policy/kl_to_sampler", "update to sampler"),
            Line("mismatch/kl", "trainer to engine"),
            Line("kl/mean", "to reference, in the reward"),
            Line("policy/reference_kl", "to reference, in the loss"),
        ),
    ),
    Panel("clip fraction", (Line("policy/clip_fraction", "policy"), Line("critic/clip_fraction", "critic"))),
    Panel("response length, tokens", (Line("response/length", "mean", spread="response/length_std"),)),
)
"""The metrics that a run is judged by. A panel shows those of its lines that were logged."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps."""

    label: str
    steps: list[int]
    values: list[float]
    low: list[float]
    """Values less their standard deviation; the values themselves where none was logged."""
    high: list[float]


def curve(records: Sequence[Record], line: Line) -> Curve:
    """Return the line's values where it has one that is finite; an empty curve where there is none."""
    points = []
    for record in records:
        value = record["metrics"].get(line.metric)
        if record["phase"] == line.phase and value is not None and math.isfinite(value):
            std = record["metrics"].get(line.spread) if line.spread else None
            points.append((record["step"], value, std if std is not None and math.isfinite(std) else 0.0))
    return Curve(
        label=line.label or line.metric,
        steps=[step for step, _, _ in points],
        values=[value for _, value, _ in points],
        low=[value - std for _, value, std in points],
        high=[value + std for _, value, std in points],
    )


def curves(records: Sequence[Record], panel: Panel) -> list[Curve]:
    """Return the panel's curves that have a point."""
    drawn = (curve(records, line) for line in _lines(records, panel))
    return [one for one in drawn if one.steps]


def _lines(records: Sequence[Record], panel: Panel) -> list[Line]:
    """Return the panel's lines, each followed by those of single agents that have the metric."""
    lines = []
    for line in panel.lines:
        lines.append(line)
        for agent in agents_with(records, line.metric):
            spread = f"{agent}/{line.spread}" if line.spread else ""
            label = f"{agent}: {line.label}" if line.label else ""
            lines.append(replace(line, metric=f"{agent}/{line.metric}", label=label, spread=spread))
    return lines


def other_metrics(records: Sequence[Record]) -> list[str]:
    """Return the names of all metrics of training that no panel shows, in alphabetical order."""
    drawn = [line for panel in PANELS for line in _lines(records, panel)]
    shown = {line.metric for line in drawn if line.phase is Phase.TRAIN}
    spreads = {line.spread for line in drawn}
    names = {name for record in records if record["phase"] == Phase.TRAIN for name in record["metrics"]}
    return sorted(names - shown - spreads)


def thinned(records: Sequence[Record], most: int) -> list[Record]:
    """Return at most ``most`` records, ascending: all if they are as few, else the newest half of that and an even
    choice of those before. Validations and tests go last.
    """
    if len(records) <= most:
        return list(records)
    newest = list(records[-(most // 2) :])
    older = records[: -(most // 2)]
    rare = [record for record in older if record["phase"] != Phase.TRAIN]
    often = [record for record in older if record["phase"] == Phase.TRAIN]
    room = most - len(newest)
    rare = _evenly(rare, max(room // 2, room - len(often)))
    kept = [*rare, *_evenly(often, room - len(rare))]
    return [*sorted(kept, key=lambda record: record["step"]), *newest]


def _evenly(records: Sequence[Record], most: int) -> list[Record]:
    if len(records) <= most:
        return list(records)
    return [records[index * len(records) // most] for index in range(most)]


def merged(earlier: Sequence[Record], later: Sequence[Record]) -> list[Record]:
    """Return the records of both by step; of two of one step and phase, that of ``later``."""
    found = {(record["step"], record["phase"]): record for record in (*earlier, *later)}
    return sorted(found.values(), key=lambda record: (record["step"], _order(record["phase"])))


def _order(phase: Phase) -> int:
    return (Phase.TRAIN, Phase.VALIDATION, Phase.TEST).index(phase)


def latest(records: Sequence[Record]) -> Mapping[str, float | None]:
    """Return the metrics of the newest training step; none before the first."""
    return next((record["metrics"] for record in reversed(records) if record["phase"] == Phase.TRAIN), {})
