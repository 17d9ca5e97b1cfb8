"""A worker meter counts what one worker does for one run, for Prometheus: see ``prometheus.py``
in this folder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from siirl_dask.context import Device, Metric
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.databuffer.limits import Traffic
from siirl_dask.trace import Entry
from siirl_dask.worker.monitoring.prometheus import Sample, exporter
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.monitoring.work import Work

_SECONDS = "seconds/"
_SUMS = {"samples": "siirl_worker_samples", "tokens": "siirl_worker_tokens"}
_TRAINING_PHASES = ("train", "replay")
_GAUGES = {
    "requests": "siirl_worker_engine_requests",
    "waiting": "siirl_worker_engine_waiting_requests",
    "cache": "siirl_worker_engine_cache_ratio",
    "arena": "siirl_worker_arena_bytes",
    "unacked": "siirl_worker_unacked_bytes",
    "device": "siirl_worker_device_bytes",
}
"""Metrics by the field of Work that they show."""


class WorkerMeter:
    """Counts over all starts of a run in this process. Read on the event loop, updated by the
    chain's thread.
    """

    def __init__(self, run: str, worker: str) -> None:
        self._labels = (run, worker)
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._source: tuple[TaskProgress, Databuffer, Callable[[], Device | None]] | None = None
        """Where the gauges of the present start of the run are read; None where there is none."""
        self._received: Counter[str] = Counter()
        """Bytes that this start of the run has received so far, by transport."""
        self._ended: list[tuple[int, int]] = []
        """Start and duration of spans that have ended, of which a later entry may be the span
        around them."""

    @staticmethod
    def of(run: str, worker: str) -> WorkerMeter | None:
        """Return the meter of a run on a worker; None where nothing is exported."""
        exports = exporter()
        if exports is None:
            return None
        return exports.meter((run, worker), lambda: WorkerMeter(run, worker))

    def begin(
        self,
        progress: TaskProgress,
        databuffer: Databuffer,
        device: Callable[[], Device | None],
    ) -> None:
        """Read gauges and bytes from a new start of the run; ``device`` returns None until its
        device is known.
        """
        self._source = (progress, databuffer, device)
        self._received = Counter()

    def end(self, databuffer: Databuffer) -> None:
        """Stop reading from a start of the run that is over, unless another one has begun."""
        if self._source is not None and self._source[1] is databuffer:
            self._source = None

    def iteration(self, phase: str, metrics: Mapping[str, Metric]) -> None:
        """Count an iteration, and the metrics that it logged on this worker."""
        self._add("siirl_worker_iterations", 1, phase)
        for name, metric in metrics.items():
            if name.startswith(_SECONDS) and "->" not in name:
                self._add("siirl_worker_node_seconds", metric.total, name.removeprefix(_SECONDS))
            elif name in _SUMS and phase in _TRAINING_PHASES:
                self._add(_SUMS[name], metric.total)
        if self._source is not None:
            self._add_received(self._source[1].traffic)

    def spans(self, entries: Iterable[Entry]) -> None:
        """Count the chain's time by lane, each moment once; entries come in the order in which
        they ended.
        """
        for entry in entries:
            if entry.beside or entry.what == "count":
                continue
            inside = 0
            while self._ended and self._ended[-1][0] >= entry.start:
                _, duration = self._ended.pop()
                inside += duration
            self._ended.append((entry.start, entry.duration))
            self._add(
                "siirl_worker_lane_seconds", max(0, entry.duration - inside) / 1e9, str(entry.lane)
            )
            if entry.what == "task":
                self._ended.clear()

    def samples(self) -> Iterator[Sample]:
        """Yield the values so far."""
        for (name, labels), value in list(self._counts.items()):
            yield name, (*self._labels, *labels), value
        for name, value in self._gauges().items():
            yield name, self._labels, value

    def _gauges(self) -> dict[str, float]:
        """Return the present values; zeros where no start of the run is active. Runs on the
        event loop.
        """
        work = Work()
        if self._source is not None:
            progress, databuffer, device = self._source
            work = Work.now(progress, databuffer, device())
        return {metric: float(getattr(work, name)) for name, metric in _GAUGES.items()}

    def _add_received(self, traffic: Traffic) -> None:
        """Count the bytes that were received since the last call, by transport."""
        links = traffic.between_hosts
        now = Counter(
            shared_memory=traffic.shared_memory,
            socket=max(0, traffic.messages - links),
            link=links,
        )
        for transport, nbytes in now.items():
            self._add("siirl_worker_received_bytes", nbytes - self._received[transport], transport)
        self._received = now

    def _add(self, name: str, value: float, *labels: str) -> None:
        self._counts[name, labels] += value
