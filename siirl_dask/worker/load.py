"""The load of a worker: what its engine, arena and device hold at a moment, as heartbeats and Prometheus tell it.

The scheduler imports this module: no torch but on a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from siirl_dask.context import Device, DeviceKind

if TYPE_CHECKING:
    from siirl_dask.coordinator.databuffer.databuffer import Databuffer
    from siirl_dask.worker.pulse import Pulse

SUFFIX = "-load"
"""End of the name under which a run's workers tell their load in Dask's metrics; their pulse is told without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load at one moment. Zeros stand for what it does not have."""

    requests: int = 0
    """Requests that its engine has under way."""
    waiting: int = 0
    """Requests among them that wait for room in the KV cache of the engine."""
    cache: float = 0.0
    """Share of the KV cache that is in use; 0 for an engine that has no bounded one."""
    arena: int = 0
    """Bytes of the arena in which rows come and go."""
    unacked: int = 0
    """Bytes of published rows that somebody still has to take."""
    device: int = 0
    """Bytes of the accelerator that torch has allocated."""

    @staticmethod
    def now(pulse: Pulse, databuffer: Databuffer, device: Device | None) -> Load:
        """Return the load of this worker. Runs on the event loop."""
        return Load(
            requests=pulse.requests,
            waiting=pulse.waiting_requests,
            cache=pulse.cache_used,
            arena=databuffer.arena.held,
            unacked=databuffer.unacked_bytes,
            device=_allocated(device),
        )

    @staticmethod
    def of(metrics: Mapping[str, Any], name: str) -> Load:
        """Return the load that a worker tells for the run with this plugin; an empty one where it tells none."""
        told = metrics.get(name + SUFFIX)
        empty = Load()
        if not isinstance(told, Mapping):
            return empty
        known = {key: told.get(key) for key in asdict(empty)}
        if not all(isinstance(value, int | float) and value >= 0 for value in known.values()):
            return empty
        return Load(**{key: type(getattr(empty, key))(value) for key, value in known.items()})


def _allocated(device: Device | None) -> int:
    if device is None or device.kind is DeviceKind.CPU:
        return 0
    from siirl_dask.devices import accelerator  # and with it torch, which a scheduler has no need of

    return accelerator.allocated_bytes(device.kind, device.index)
