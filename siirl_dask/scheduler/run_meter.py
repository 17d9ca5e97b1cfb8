"""A run's headline metrics on the scheduler, for Prometheus: merged from what workers report to the
driver.

The scheduler imports this module: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from siirl_dask.context import Metric, Reduce
from siirl_dask.worker.monitoring.prometheus import Sample, exporter

_HEADLINES = {
    "reward/mean": "siirl_run_reward",
    "reward/std": "siirl_run_reward_std",
    "response/length": "siirl_run_response_length",
    "policy/entropy": "siirl_run_entropy",
    "policy/kl_to_sampler": "siirl_run_kl_to_sampler",
    "policy/clip_fraction": "siirl_run_clip_fraction",
    "policy/grad_norm": "siirl_run_grad_norm",
    "policy/loss": "siirl_run_loss",
}
_SUMS = {
    "bytes/peers": "siirl_run_peer_bytes",
    "samples": "siirl_run_samples",
    "tokens": "siirl_run_tokens",
}
_VALIDATION = {"reward/mean": "siirl_run_validation_reward"}
_TRAINING_PHASES = ("train", "replay")
_VALIDATION_PHASE = "validation"


class RunMeter:
    """Holds the newest values of one run, over all its starts on this scheduler."""

    def __init__(self, run: str) -> None:
        self._labels = (run,)
        self._values: dict[str, float] = {}

    def begin(self, workers: int) -> None:
        """Set the number of workers of a new start of the run."""
        self._values["siirl_run_workers"] = workers

    def take(self, phase: str, step: int, merged: Mapping[str, Metric]) -> None:
        """Update the values with the merged metrics of an iteration."""
        gauges: Mapping[str, str] = {}
        if phase == _VALIDATION_PHASE:
            gauges = _VALIDATION
        if phase in _TRAINING_PHASES:
            gauges = _HEADLINES
            self._values["siirl_run_step"] = step
        for name, metric in merged.items():
            if name in gauges and metric.value is not None:
                self._values[gauges[name]] = metric.value
            if name in _SUMS and phase in _TRAINING_PHASES:
                counter = _SUMS[name]
                self._values[counter] = self._values.get(counter, 0.0) + metric.total

    def samples(self) -> Iterator[Sample]:
        """Yield the newest values."""
        for name, value in list(self._values.items()):
            yield name, self._labels, value


class StepMerger:
    """Merges the headline metrics of an iteration once every worker has reported it, and gives
    them to the meter.
    """

    def __init__(self, meter: RunMeter, members: int) -> None:
        self._meter = meter
        self._members = members
        self._parts: dict[int, list[dict[str, Metric]]] = {}
        meter.begin(members)

    @staticmethod
    def of(run: str, members: int) -> StepMerger | None:
        """Return the merger of a start of the run; None where nothing is exported."""
        exports = exporter()
        if exports is None:
            return None
        return StepMerger(exports.meter((run,), lambda: RunMeter(run)), members)

    def take(self, event: Mapping[str, Any]) -> None:
        """Merge a worker's report that its chain is done. A malformed one is ignored, since the
        driver refuses it.
        """
        match event:
            case {
                "kind": "done",
                "sequence": int(sequence),
                "phase": str(phase),
                "step": int(step),
                "metrics": dict(metrics),
            }:
                parts = self._parts.setdefault(sequence, [])
                parts.append(_headlines(metrics))
                if len(parts) >= self._members:
                    del self._parts[sequence]
                    self._meter.take(phase, step, _merged(parts))


def _headlines(metrics: Mapping[Any, Any]) -> dict[str, Metric]:
    """Return the well-formed metrics of a message that are exported."""
    headlines: dict[str, Metric] = {}
    for name, packed in metrics.items():
        if name in _HEADLINES or name in _SUMS:
            metric = _unpacked(packed)
            if metric is not None:
                headlines[name] = metric
    return headlines


def _unpacked(packed: object) -> Metric | None:
    """Return a metric of a message; None for a malformed one."""
    match packed:
        case [str(reduce), *values] if reduce in set(Reduce) and len(values) == 5:
            numbers = [float(value) for value in values if isinstance(value, (int, float))]
            if len(numbers) == 5 and 0 <= numbers[0] < math.inf:
                weight, total, squares, low, high = numbers
                return Metric(Reduce(reduce), weight, total, squares=squares, low=low, high=high)
    return None


def _merged(parts: list[dict[str, Metric]]) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
            elif merged[name].reduce is metric.reduce:
                merged[name].merge(metric)
    return merged
