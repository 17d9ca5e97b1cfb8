"""A run's headline metrics on the scheduler, for Prometheus: merged from what workers report to the driver.

The scheduler imports this module: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from siirl_dask.context import Metric, Reduce
from siirl_dask.worker.prometheus import Sample, exporter

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
_SUMS = {"bytes/peers": "siirl_run_peer_bytes", "samples": "siirl_run_samples", "tokens": "siirl_run_tokens"}
_VALIDATION = {"reward/mean": "siirl_run_validation_reward"}
_TRAINED, _VALIDATED = ("train", "replay"), "validation"


class RunMeter:
    """Holds the newest values of one run, over all its starts on this scheduler."""

    def __init__(self, run: str) -> None:
        self._labels = (run,)
        self._values: dict[str, float] = {}

    def begin(self, workers: int) -> None:
        """Note that a start of the run has so many workers."""
        self._values["siirl_run_workers"] = workers

    def take(self, phase: str, step: int, merged: Mapping[str, Metric]) -> None:
        """Take the merged metrics of an iteration."""
        if phase in _TRAINED:
            self._values["siirl_run_step"] = step
        for name, metric in merged.items():
            gauge = _HEADLINES.get(name) if phase in _TRAINED else None
            gauge = _VALIDATION.get(name) if phase == _VALIDATED else gauge
            if gauge is not None and metric.value is not None:
                self._values[gauge] = metric.value
            if (counter := _SUMS.get(name)) is not None and phase in _TRAINED:
                self._values[counter] = self._values.get(counter, 0.0) + metric.total

    def samples(self) -> Iterator[Sample]:
        """Yield the newest values."""
        for name, value in list(self._values.items()):
            yield name, self._labels, value


class StepMerger:
    """Merges the headline metrics of an iteration once every worker has reported it, and gives them to the meter."""

    def __init__(self, meter: RunMeter, members: int) -> None:
        self._meter, self._members = meter, members
        self._parts: dict[int, list[dict[str, Metric]]] = {}
        meter.begin(members)

    @staticmethod
    def of(run: str, members: int) -> StepMerger | None:
        """Return the merger of a start of the run; None where nothing is exported."""
        exports = exporter()
        return None if exports is None else StepMerger(exports.meter((run,), lambda: RunMeter(run)), members)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take a worker's report that its chain is done. One that is malformed counts for nothing: the driver refuses
        it.
        """
        match event:
            case {
                "kind": "done",
                "sequence": int(sequence),
                "phase": str(phase),
                "step": int(step),
                "metrics": dict(told),
            }:
                parts = self._parts.setdefault(sequence, [])
                parts.append({name: metric for name in told if (metric := _metric(name, told[name])) is not None})
                if len(parts) >= self._members:
                    del self._parts[sequence]
                    self._meter.take(phase, step, _merged(parts))


def _metric(name: object, entry: object) -> Metric | None:
    """Return a headline metric of a message; None for any other."""
    if name not in _HEADLINES and name not in _SUMS:
        return None
    match entry:
        case [str(reduce), *given] if reduce in set(Reduce):
            numbers = [float(number) for number in given if isinstance(number, (int, float))]
            if len(numbers) == len(given) == 5 and 0 <= numbers[0] < math.inf:
                return Metric(Reduce(reduce), *numbers)
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
