"""Panels of curves that a run is judged by, for the page and the plot, whatever draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from siirl_dask.observe import Record, agents_with
from siirl_dask.planner import Phase
from siirl_dask.views.charts.series import Curve, series_of, thin


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


REWARD = Panel("reward", (Line("reward/mean", "mean", spread="reward/std"),))
VALIDATION = Panel(
    "validation",
    (Line("reward/mean", "validation", Phase.VALIDATION), Line("reward/mean", "test", Phase.TEST)),
)
ENTROPY = Panel("entropy, nats a token", (Line("policy/entropy", "policy"),))
PANELS = (
    REWARD,
    VALIDATION,
    ENTROPY,
    Panel(
        "KL divergence",
        (
            Line("policy/kl_to_sampler", "policy to its sampler"),
            Line("mismatch/kl", "trainer to engine, same weights"),
            Line("kl/mean", "to reference, in the reward"),
            Line("policy/reference_kl", "to reference, in the loss"),
        ),
    ),
    Panel(
        "clip fraction",
        (Line("policy/clip_fraction", "policy"), Line("critic/clip_fraction", "critic")),
    ),
    Panel(
        "response length, tokens", (Line("response/length", "mean", spread="response/length_std"),)
    ),
)
"""The metrics that a run is judged by. A panel shows those of its lines that were logged."""


def curve(records: Sequence[Record], line: Line, most: int | None = None) -> Curve:
    """Return the line's values where it has one that is finite, in at most ``most`` points; None:
    in one a step.

    A curve without points where there is no value.
    """
    series = series_of(records, line.phase, line.metric)
    spread = {}
    if line.spread:
        spread = dict(series_of(records, line.phase, line.spread))
    if most is None:
        most = len(series)
    points = thin(series, most, spread)
    newest = 0.0
    if series:
        newest = series[-1][1]
    return Curve(line.label or line.metric, points, newest=newest)


def curves(records: Sequence[Record], panel: Panel, most: int | None = None) -> list[Curve]:
    """Return the panel's curves that have a point, numbered."""
    drawn = (curve(records, line, most) for line in _lines(records, panel))
    return [
        replace(one, number=number) for number, one in enumerate(one for one in drawn if one.points)
    ]


def _lines(records: Sequence[Record], panel: Panel) -> list[Line]:
    """Return the panel's lines, each followed by those of single agents that have the metric."""
    lines = []
    for line in panel.lines:
        lines.append(line)
        for agent in agents_with(records, line.metric):
            spread = ""
            if line.spread:
                spread = f"{agent}/{line.spread}"
            label = ""
            if line.label:
                label = f"{agent}: {line.label}"
            lines.append(replace(line, metric=f"{agent}/{line.metric}", label=label, spread=spread))
    return lines


def other_metrics(records: Sequence[Record]) -> list[str]:
    """Return the names of all metrics of training that no panel shows, in alphabetical order."""
    drawn = [line for panel in PANELS for line in _lines(records, panel)]
    shown = {line.metric for line in drawn if line.phase is Phase.TRAIN}
    spreads = {line.spread for line in drawn}
    names = {
        name for record in records if record["phase"] == Phase.TRAIN for name in record["metrics"]
    }
    return sorted(names - shown - spreads)
