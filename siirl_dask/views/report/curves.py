"""The charts of a report: what is asked of every run first, all other metrics below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from siirl_dask.planner import Phase
from siirl_dask.views.charts.headlines import ALWAYS, SECONDS, headlines_of
from siirl_dask.views.charts.thinning import series_of
from siirl_dask.views.report.chart import Curve, chart
from siirl_dask.views.report.gather import RunFacts

_Metric = tuple[Phase, str]
_MOST = 150  # charts of other metrics


def headline_charts(runs: Sequence[RunFacts]) -> list[str]:
    """Return the charts of the headlines."""
    headlines = _headlines(runs)
    curves = {metric: _curves(runs, metric) for metric in headlines}
    drawn = [chart(title, curves[metric]) for metric, title in headlines.items() if _is_told(metric, curves[metric])]
    return [figure for figure in drawn if figure]


def other_charts(runs: Sequence[RunFacts]) -> tuple[list[str], int]:
    """Return the charts of the other metrics, and the number of metrics that are too many."""
    metrics = sorted(_logged(runs) - _headlines(runs).keys(), key=lambda metric: (metric[0] != Phase.TRAIN, *metric))
    drawn = [
        chart(name if phase == Phase.TRAIN else f"{phase}: {name}", _curves(runs, (phase, name)), tooltips=False)
        for phase, name in metrics[:_MOST]
    ]
    return [figure for figure in drawn if figure], max(0, len(metrics) - _MOST)


def _headlines(runs: Sequence[RunFacts]) -> dict[_Metric, str]:
    return headlines_of([record for run in runs for record in run.records])


def _curves(runs: Sequence[RunFacts], metric: _Metric) -> list[Curve]:
    return [Curve(number, run.label, series_of(run.records, *metric)) for number, run in enumerate(runs)]


def _is_told(metric: _Metric, curves: Sequence[Curve]) -> bool:
    """Return whether a metric says something: one that is always 0 does not, but for the reward."""
    return metric[1] in ALWAYS or any(value for curve in curves for _, value in curve.series)


def _logged(runs: Sequence[RunFacts]) -> set[_Metric]:
    return {metric for run in runs for metric in _metrics_of(run)}


def _metrics_of(run: RunFacts) -> Iterator[_Metric]:
    for record in run.records:
        for name in record["metrics"]:
            yield record["phase"], name
        if record["phase"] != Phase.TRAIN:
            yield record["phase"], SECONDS
