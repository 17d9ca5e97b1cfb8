"""The charts of a report: what is asked of every run first, all other metrics below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from siirl_dask.planner import Phase
from siirl_dask.views.charts.colours import class_of
from siirl_dask.views.charts.figures import number
from siirl_dask.views.charts.headlines import SECONDS, headlines_of, is_shown
from siirl_dask.views.charts.line_chart import HEIGHT, MOST_POINTS, WIDTH, line_chart
from siirl_dask.views.charts.series import Curve, series_of, thin
from siirl_dask.views.html_page import safe
from siirl_dask.views.report.gather import RunFacts

_Metric = tuple[Phase, str]
_MOST = 150  # charts of other metrics


def headline_charts(runs: Sequence[RunFacts]) -> list[str]:
    """Return the charts of the headlines."""
    curves = {(metric, title): _curves(runs, metric) for metric, title in _headlines(runs).items()}
    return [
        _figure(title, drawn)
        for ((_, name), title), drawn in curves.items()
        if drawn
        and is_shown(name, (value for curve in drawn for value in (*curve.low, *curve.high)))
    ]


def other_charts(runs: Sequence[RunFacts]) -> tuple[list[str], int]:
    """Return the charts of the other metrics, and the number of metrics that are too many."""
    metrics = sorted(
        _logged(runs) - _headlines(runs).keys(),
        key=lambda metric: (metric[0] != Phase.TRAIN, *metric),
    )
    figures = [
        _figure(name if phase == Phase.TRAIN else f"{phase}: {name}", drawn, tooltips=False)
        for phase, name in metrics[:_MOST]
        if (drawn := _curves(runs, (phase, name)))
    ]
    return figures, max(0, len(metrics) - _MOST)


def _figure(title: str, curves: Sequence[Curve], *, tooltips: bool = True) -> str:
    last = " ".join(
        f'<b class="{class_of(curve.number)}">{number(curve.newest)}</b>' for curve in curves
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}">'
    chart = line_chart(curves, tooltips=tooltips)
    return f"<figure><figcaption><span>{safe(title)}</span><span>{last}</span></figcaption>{svg}{chart}</svg></figure>"


def _headlines(runs: Sequence[RunFacts]) -> dict[_Metric, str]:
    return headlines_of([record for run in runs for record in run.records])


def _curves(runs: Sequence[RunFacts], metric: _Metric) -> list[Curve]:
    """Return a curve of each run that logged the metric, in the run's colour."""
    phase, name = metric
    logged = {number: series_of(run.records, phase, name) for number, run in enumerate(runs)}
    return [
        Curve(runs[number].label, thin(series, MOST_POINTS), newest=series[-1][1], number=number)
        for number, series in logged.items()
        if series
    ]


def _logged(runs: Sequence[RunFacts]) -> set[_Metric]:
    return {metric for run in runs for metric in _metrics_of(run)}


def _metrics_of(run: RunFacts) -> Iterator[_Metric]:
    for record in run.records:
        for name in record["metrics"]:
            yield record["phase"], name
        if record["phase"] != Phase.TRAIN:
            yield record["phase"], SECONDS
