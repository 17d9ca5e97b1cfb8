"""Computes how much of its accelerator's memory a worker's engine may take: all that the other
roles there leave.

All workers compute the same from their devices and from the roles' footprints, so all refuse a run
that does not fit, before a role is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import PlanError
from siirl_dask.planner import Footprint
from siirl_dask.planner.explain.device_memory import refusal
from siirl_dask.planner.footprint import Roles, fill


def share_devices(
    devices: Mapping[str, Device],
    placement: Mapping[str, Sequence[str]],
    footprints: Mapping[str, Footprint],
    memory: int | None,
) -> dict[str, Device]:
    """Return the devices with ``room`` and ``fill``; those of unknown memory, and CPUs, as they
    are.

    ``memory`` is the bytes of every accelerator; None: those that the devices report. PlanError,
    with proposals, where the roles of the workers on an accelerator do not fit.
    """
    shared = dict(devices)
    for workers in _workers_by_card(devices):
        found = devices[workers[0]].memory
        card_memory = memory if memory else found
        if not card_memory:
            continue
        roles = {worker: _roles(worker, placement, footprints) for worker in workers}
        label = f"workers {workers} on {devices[workers[0]].card}"
        reason = refusal(label, card_memory, roles)
        if reason is not None:
            raise PlanError(f"{reason}\n{_way_out(roles)}")
        if found:
            card_memory = min(card_memory, found)
        card = fill(card_memory, roles)
        for worker in workers:
            filling = card.filling(worker)
            if filling is not None and filling.fills is not None:
                shared[worker] = replace(
                    devices[worker],
                    memory=card_memory,
                    room=sum(filling.held.values()),
                    fill=filling.held[filling.fills],
                )
    return shared


def _workers_by_card(devices: Mapping[str, Device]) -> list[list[str]]:
    cards: dict[str, list[str]] = {}
    for worker, device in devices.items():
        if device.kind is not DeviceKind.CPU:
            cards.setdefault(device.card, []).append(worker)
    return list(cards.values())


def _roles(
    worker: str, placement: Mapping[str, Sequence[str]], footprints: Mapping[str, Footprint]
) -> Roles:
    return {
        role: footprint
        for role, footprint in footprints.items()
        if worker in placement.get(role, ())
    }


def _way_out(roles_of_workers: Mapping[str, Roles]) -> str:
    """Return what lets a run begin whose roles do not fit, by the arithmetic that may be wrong."""
    text = "A larger cluster.device_memory lets it begin in any case"
    keys = set()
    for roles in roles_of_workers.values():
        for own in roles.values():
            if own.share_key:
                keys.add(own.share_key)
    if keys:
        text += f"; {' or '.join(sorted(keys))} then says what an engine takes"
    return text
