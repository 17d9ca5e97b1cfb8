"""Counters for Prometheus, at the ``/metrics`` that Dask's scheduler and workers serve where
prometheus_client is.

Where it is not installed nothing is counted. Labels are bounded: a process keeps the newest runs, a
run has so many workers, and nodes, lanes, phases and transports are few. The scheduler imports this
module: no torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

_MAX_METERS = 32  # of a process: one for each run and worker in it; most processes have one


class MetricFamily(NamedTuple):
    """A metric by its name, as Prometheus knows it."""

    kind: str
    """``counter``, whose samples have ``_total`` behind the name, or ``gauge``."""
    labels: tuple[str, ...]
    help: str


_WORKER = ("run", "worker")
FAMILIES = {
    "siirl_worker_iterations": MetricFamily(
        "counter", (*_WORKER, "phase"), "Passes through the worker's chain."
    ),
    "siirl_worker_samples": MetricFamily(
        "counter", _WORKER, "Responses that the worker generated."
    ),
    "siirl_worker_tokens": MetricFamily(
        "counter", _WORKER, "Tokens of the responses that the worker generated."
    ),
    "siirl_worker_received_bytes": MetricFamily(
        "counter", (*_WORKER, "transport"), "Bytes of rows from other workers."
    ),
    "siirl_worker_lane_seconds": MetricFamily(
        "counter", (*_WORKER, "lane"), "Seconds of the chain in a lane of the trace."
    ),
    "siirl_worker_node_seconds": MetricFamily(
        "counter", (*_WORKER, "node"), "Seconds of a node, with its waits."
    ),
    "siirl_worker_engine_requests": MetricFamily(
        "gauge", _WORKER, "Requests that the engine has under way."
    ),
    "siirl_worker_engine_waiting_requests": MetricFamily(
        "gauge", _WORKER, "Requests of these that wait for room in the engine's KV cache."
    ),
    "siirl_worker_engine_cache_ratio": MetricFamily(
        "gauge", _WORKER, "Share of the engine's KV cache that is in use."
    ),
    "siirl_worker_arena_bytes": MetricFamily(
        "gauge", _WORKER, "Bytes of the arena in which rows come and go."
    ),
    "siirl_worker_unacked_bytes": MetricFamily(
        "gauge", _WORKER, "Bytes of published rows that somebody still has to take."
    ),
    "siirl_worker_device_bytes": MetricFamily(
        "gauge", _WORKER, "Bytes of the accelerator that torch has allocated."
    ),
    "siirl_run_step": MetricFamily(
        "gauge", ("run",), "Newest training step that all workers have done."
    ),
    "siirl_run_workers": MetricFamily("gauge", ("run",), "Workers of the run."),
    "siirl_run_reward": MetricFamily("gauge", ("run",), "Mean reward of the newest step."),
    "siirl_run_reward_std": MetricFamily(
        "gauge", ("run",), "Standard deviation of the reward in the newest step."
    ),
    "siirl_run_validation_reward": MetricFamily(
        "gauge", ("run",), "Mean reward of the newest validation."
    ),
    "siirl_run_response_length": MetricFamily(
        "gauge", ("run",), "Mean tokens of a response in the newest step."
    ),
    "siirl_run_entropy": MetricFamily(
        "gauge", ("run",), "Mean entropy of the policy in the newest step."
    ),
    "siirl_run_kl_to_sampler": MetricFamily(
        "gauge", ("run",), "KL from the sampler to the policy in the newest step."
    ),
    "siirl_run_clip_fraction": MetricFamily(
        "gauge", ("run",), "Share of tokens whose ratio was clipped in the newest step."
    ),
    "siirl_run_grad_norm": MetricFamily(
        "gauge", ("run",), "Norm of the policy's gradient in the newest step."
    ),
    "siirl_run_loss": MetricFamily("gauge", ("run",), "Loss of the policy in the newest step."),
    "siirl_run_peer_bytes": MetricFamily(
        "counter", ("run",), "Bytes of rows from worker to worker."
    ),
    "siirl_run_samples": MetricFamily(
        "counter", ("run",), "Responses that the run's steps have generated."
    ),
    "siirl_run_tokens": MetricFamily("counter", ("run",), "Tokens of these responses."),
}
"""Everything that is exported. docs/monitoring.md lists it."""
Sample = tuple[str, tuple[str, ...], float]
"""Family, values of its labels, value."""


class Meter(Protocol):
    """Has the samples of one run in this process."""

    def samples(self) -> Iterator[Sample]: ...


M = TypeVar("M", bound=Meter)


class Exporter:
    """Collects the samples of all meters of this process when Prometheus asks."""

    def __init__(self) -> None:
        self._meters: OrderedDict[tuple[str, ...], Meter] = OrderedDict()
        self._lock = threading.Lock()

    def meter(self, key: tuple[str, ...], make: Callable[[], M]) -> M:
        """Return the meter of this key, so that counts go on in another start of a run; a new one
        replaces the oldest where there are too many.
        """
        with self._lock:
            meter: Any = self._meters.pop(key, None)
            if meter is None:
                meter = make()
            self._meters[key] = meter
            while len(self._meters) > _MAX_METERS:
                self._meters.popitem(last=False)
        known: M = meter
        return known

    def describe(self) -> list[Any]:
        """Return no families: before a run nobody knows which have samples."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield each family that has samples. prometheus_client calls this."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        with self._lock:
            meters = list(self._meters.values())
        values: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for meter in meters:
            for name, labels, value in meter.samples():
                values.setdefault(name, []).append((labels, value))
        for name, family in FAMILIES.items():
            if name in values:
                exported = kinds[family.kind](name, family.help, labels=family.labels)
                for labels, value in values[name]:
                    exported.add_metric(labels, value)
                yield exported


@cache
def exporter() -> Exporter | None:
    """Return the exporter of this process's meters; None without prometheus_client.

    There is one in a process, since prometheus_client has one registry in a process, which Dask
    serves.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    registered = Exporter()
    REGISTRY.register(registered)
    return registered
