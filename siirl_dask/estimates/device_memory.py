"""The memory that a run's roles need on the workers' accelerators, and whether it fits
``cluster.device_memory``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from siirl_dask.config import Config, DevicePreference, parse_bytes
from siirl_dask.errors import PlanError
from siirl_dask.planner import Footprint, Plan, RoleCost, by_host
from siirl_dask.planner.explain.device_memory import refusal
from siirl_dask.wording import worker_ranges

Cards = Mapping[str, Mapping[str, Mapping[str, Footprint]]]
"""The workers of each accelerator, by a label, and the roles of each."""


def footprints_of(costs: Mapping[str, RoleCost]) -> dict[str, Footprint]:
    """Return the memory of each role on an accelerator; without roles for which it is not known."""
    found = {}
    for role, cost in costs.items():
        if cost.device is not None:
            found[role] = cost.device
        elif cost.memory is not None:
            found[role] = Footprint(held={"memory": cost.memory} if cost.memory else {})
    return found


def device_memory(config: Config) -> int | None:
    """Return the bytes of each worker's accelerator, where the configuration names them and does
    not take the CPUs.
    """
    memory = config.cluster.device_memory
    if memory is None or config.cluster.device is DevicePreference.cpu:
        return None
    return parse_bytes("cluster.device_memory", memory)


def cards_of(plan: Plan, footprints: Mapping[str, Footprint], per_host: int | None = None) -> Cards:
    """Return one accelerator of each group whose workers have the same roles; without workers that
    use no memory.

    ``per_host`` is the number of accelerators of each host, which its workers share in turn; None:
    one for each worker.
    """
    roles: dict[str, dict[str, Footprint]] = {}
    for worker in plan.chains:
        own = {
            role: size
            for role, size in footprints.items()
            if worker in plan.placement.get(role, ())
        }
        roles[worker] = own
    groups: dict[tuple[tuple[str, ...], ...], list[list[str]]] = {}
    for workers in _sharers(plan, per_host):
        if any(footprint.busy for worker in workers for footprint in roles[worker].values()):
            groups.setdefault(tuple(tuple(roles[worker]) for worker in workers), []).append(workers)
    everyone = tuple(plan.chains)
    cards = {}
    for group in groups.values():
        members = [worker for workers in group for worker in workers]
        label = f"Worker{'s' if len(members) > 1 else ''} {worker_ranges(members, everyone)}"
        cards[label] = {worker: roles[worker] for worker in group[0]}
    return cards


def _sharers(plan: Plan, per_host: int | None) -> Iterator[list[str]]:
    """Yield the workers of each accelerator, as they will choose: see
    worker/hardware/devices.py.
    """
    for workers in by_host(plan.chains, plan.hosts or {}).values():
        count = len(workers) if per_host is None else min(per_host, len(workers))
        for card in range(count):
            yield list(workers[card::count])


def check_devices(memory: int | None, cards: Cards) -> None:
    """Raise PlanError, with what to change, for roles that do not fit on accelerators of
    ``memory`` bytes.
    """
    if memory is None:
        return
    for label, workers in cards.items():
        reason = refusal(label, memory, workers)
        if reason is not None:
            raise PlanError(f"{reason}\nA larger cluster.device_memory lets it begin in any case")
