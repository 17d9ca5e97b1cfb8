"""Says what a worker's engine may take of its accelerator: what all roles of the workers on it leave, as the plan says.

All workers compute this alike from their devices and from the roles' footprints, so all refuse a run that does not fit,
before a role is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import PlanError
from siirl_dask.planner import Footprint
from siirl_dask.planner.explain.device_memory import refusal
from siirl_dask.planner.footprint import Roles, fill

_LARGER = (
    "A larger cluster.device_memory lets it begin in any case; rollout.vllm.gpu_memory_utilization then says what an "
    "engine takes"
)


def share_devices(
    devices: Mapping[str, Device],
    placement: Mapping[str, Sequence[str]],
    footprints: Mapping[str, Footprint],
    memory: int | None,
) -> dict[str, Device]:
    """Return the devices with ``room`` and ``fill``; those of unknown memory, and CPUs, as they are.

    ``memory`` is that of every accelerator in bytes; None: as the devices say. PlanError, with what to change, where
    the roles of the workers on an accelerator do not fit.
    """
    shared = dict(devices)
    for workers in _by_card(devices):
        found = devices[workers[0]].memory
        if not (own := memory or found):
            continue
        roles = {worker: _roles(worker, placement, footprints) for worker in workers}
        label = f"workers {workers} on {devices[workers[0]].card}"
        if (reason := refusal(label, own, roles)) is not None:
            raise PlanError(f"{reason}\n{_LARGER}")
        own = min(own, found or own)
        card = fill(own, roles)
        for worker in workers:
            if (one := card.filling(worker)) is not None and one.fills is not None:
                room, cache = sum(one.held.values()), one.held[one.fills]
                shared[worker] = replace(devices[worker], memory=own, room=room, fill=cache)
    return shared


def _by_card(devices: Mapping[str, Device]) -> list[list[str]]:
    cards: dict[str, list[str]] = {}
    for worker, device in devices.items():
        if device.kind is not DeviceKind.CPU:
            cards.setdefault(device.card, []).append(worker)
    return list(cards.values())


def _roles(worker: str, placement: Mapping[str, Sequence[str]], footprints: Mapping[str, Footprint]) -> Roles:
    return {role: one for role, one in footprints.items() if worker in placement.get(role, ())}
