"""A worker meter counts what one worker does for one run, for Prometheus: see ``siirl_dask.worker.prometheus``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from siirl_dask.context import Device, Metric
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.databuffer.traffic import Traffic
from siirl_dask.trace import Entry
from siirl_dask.worker.load import Load
from siirl_dask.worker.prometheus import Sample, exporter
from siirl_dask.worker.pulse import Pulse

_SECONDS = "seconds/"
_SUMS = {"samples": "siirl_worker_samples", "tokens": "siirl_worker_tokens"}
_TRAINED = ("train", "replay")
_GAUGES = {
    "requests": "siirl_worker_engine_requests",
    "waiting": "siirl_worker_engine_waiting_requests",
    "cache": "siirl_worker_engine_cache_ratio",
    "arena": "siirl_worker_arena_bytes",
    "unacked": "siirl_worker_unacked_bytes",
    "device": "siirl_worker_device_bytes",
}
"""Metrics by the field of Load that they show."""


class WorkerMeter:
    """Counts over all starts of a run in this process. Scraped on the event loop, fed by the chain's thread."""

    def __init__(self, run: str, worker: str) -> None:
        self._labels = (run, worker)
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._source: tuple[Pulse, Databuffer, Callable[[], Device | None]] | None = None
        self._carried: Counter[str] = Counter()
        self._within: list[tuple[int, int]] = []

    @staticmethod
    def of(run: str, worker: str) -> WorkerMeter | None:
        """Return the meter of a run on a worker; None where nothing is exported."""
        exports = exporter()
        return None if exports is None else exports.meter((run, worker), lambda: WorkerMeter(run, worker))

    def begin(self, pulse: Pulse, databuffer: Databuffer, device: Callable[[], Device | None]) -> None:
        """Read gauges and bytes of this start of the run from here on; its device may come later."""
        self._source, self._carried = (pulse, databuffer, device), Counter()

    def end(self, databuffer: Databuffer) -> None:
        """Let go of a start of the run that is over, unless another one has begun."""
        if self._source is not None and self._source[1] is databuffer:
            self._source = None

    def iteration(self, phase: str, metrics: Mapping[str, Metric]) -> None:
        """Count an iteration, with what it logged on this worker."""
        self._add("siirl_worker_iterations", 1, phase)
        for name, metric in metrics.items():
            if name.startswith(_SECONDS) and "->" not in name:
                self._add("siirl_worker_node_seconds", metric.total, name.removeprefix(_SECONDS))
            elif name in _SUMS and phase in _TRAINED:
                self._add(_SUMS[name], metric.total)
        if self._source is not None:
            self._carry(self._source[1].traffic)

    def spans(self, entries: Iterable[Entry]) -> None:
        """Count the chain's time by lane, each moment once; entries come in the order in which they ended."""
        for entry in entries:
            if entry.beside or entry.what == "count":
                continue
            inside = 0
            while self._within and self._within[-1][0] >= entry.start:
                inside += self._within.pop()[1]
            self._within.append((entry.start, entry.duration))
            self._add("siirl_worker_lane_seconds", max(0, entry.duration - inside) / 1e9, str(entry.lane))
            if entry.what == "task":
                self._within.clear()

    def samples(self) -> Iterator[Sample]:
        """Yield the values so far."""
        for (name, labels), value in list(self._counts.items()):
            yield name, (*self._labels, *labels), value
        for name, value in self._gauges().items():
            yield name, self._labels, value

    def _gauges(self) -> dict[str, float]:
        """Return the values of this moment; zeros where no start of the run is here. Runs on the event loop."""
        load = Load()
        if self._source is not None:
            pulse, databuffer, device = self._source
            load = Load.now(pulse, databuffer, device())
        return {metric: float(getattr(load, name)) for name, metric in _GAUGES.items()}

    def _carry(self, traffic: Traffic) -> None:
        """Count the bytes that have come since the last time, by the way that they came."""
        links = traffic.between_hosts
        now = Counter(shared_memory=traffic.shared_memory, socket=max(0, traffic.messages - links), link=links)
        for transport, nbytes in now.items():
            self._add("siirl_worker_received_bytes", nbytes - self._carried[transport], transport)
        self._carried = now

    def _add(self, name: str, value: float, *labels: str) -> None:
        self._counts[name, labels] += value
