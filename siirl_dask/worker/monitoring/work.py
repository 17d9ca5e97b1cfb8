"""A worker's work at a moment: requests of its engine, bytes of its arena and device; for
heartbeats and Prometheus.

The scheduler imports this module: no torch but on a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from siirl_dask.context import Device, DeviceKind

if TYPE_CHECKING:
    from siirl_dask.coordinator.databuffer.databuffer import Databuffer
    from siirl_dask.worker.monitoring.task_progress import TaskProgress

SUFFIX = "-load"
"""End of the name of a run's entry in a worker's metrics in Dask; the entry without it is the
worker's progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A worker's requests and memory at one moment. Zeros stand for an engine or a device that
    it does not have.
    """

    requests: int = 0
    """Requests that its engine is processing."""
    waiting: int = 0
    """Requests among them that wait for room in the KV cache of the engine."""
    cache: float = 0.0
    """Share of the KV cache that is in use; 0 for an engine that has no bounded one."""
    arena: int = 0
    """Bytes of the arena that holds rows to be sent and received rows."""
    unacked: int = 0
    """Bytes of published rows that somebody still has to take."""
    device: int = 0
    """Bytes of the accelerator that torch has allocated."""

    @staticmethod
    def now(progress: TaskProgress, databuffer: Databuffer, device: Device | None) -> Work:
        """Return the work of this worker. Runs on the event loop."""
        return Work(
            requests=progress.requests,
            waiting=progress.waiting_requests,
            cache=progress.cache_used,
            arena=databuffer.arena.held,
            unacked=databuffer.unacked_bytes,
            device=_allocated(device),
        )

    @staticmethod
    def of(metrics: Mapping[str, Any], plugin: str) -> Work:
        """Return the work that a worker reports in its metrics for the run with this plugin; an
        empty one where it reports none, or a malformed one.
        """
        reported = metrics.get(plugin + SUFFIX)
        empty = Work()
        if not isinstance(reported, Mapping):
            return empty
        fields = {name: reported.get(name) for name in asdict(empty)}
        if not all(isinstance(value, int | float) and value >= 0 for value in fields.values()):
            return empty
        typed = {}
        for name, value in fields.items():
            kind = type(getattr(empty, name))
            typed[name] = kind(value)
        return Work(**typed)


def _allocated(device: Device | None) -> int:
    if device is None or device.kind is DeviceKind.CPU:
        return 0
    # and with it torch, which a scheduler has no need of
    from siirl_dask.devices import accelerator

    return accelerator.allocated_bytes(device.kind, device.index)
