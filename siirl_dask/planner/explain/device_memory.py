"""The memory of accelerators as text and as plain data: each role's parts at each moment, and
what to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from siirl_dask.planner.footprint import (
    EXCHANGE,
    Card,
    Footprint,
    Roles,
    fill,
    moments,
    peak,
    remedies,
)
from siirl_dask.wording import readable_bytes, table

COMMON = {f"{size} GB": size * 10**9 for size in (24, 48, 80, 141)}
"""Sizes in which accelerators are sold."""
_MORE = (
    "take more workers and trainer.backend=fsdp, whose shards get smaller, give roles workers of "
    "their own (cluster.placement), or take a smaller model"
)


def describe_card(label: str, memory: int, workers: Mapping[str, Roles]) -> str:
    """Describe an accelerator of ``memory`` bytes with the roles of ``workers``: parts, moments,
    and the verdict.
    """
    card = fill(memory, workers)
    shared = ""
    if len(workers) > 1:
        shared = f", which {len(workers)} workers share"
    title = (
        f"{label}, on {readable_bytes(memory)}{shared}, of which {readable_bytes(card.usable)} are "
        "for roles"
    )
    tables = []
    for names in alike(card.workers).values():
        roles = card.workers[names[0]]
        tables.append(_parts(roles, names if len(workers) > 1 else ()))
    return "\n".join([title, *tables, *_verdict(card, workers)])


def alike(workers: Mapping[str, Roles]) -> dict[tuple[str, ...], list[str]]:
    """Return the workers by the names of their roles."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for worker, roles in workers.items():
        groups.setdefault(tuple(roles), []).append(worker)
    return groups


def _parts(roles: Roles, names: Sequence[str]) -> str:
    own = moments(roles)
    shown = []
    for name in own:
        if name == EXCHANGE or roles[name].held or roles[name].working:
            shown.append(name)
    rows = []
    for role, one in roles.items():
        for part, size in one.held.items():
            cells = [role, part]
            for now in shown:
                cells.append(readable_bytes(size) if _is_there(role, one, part, now) else "-")
            rows.append(tuple(cells))
        for part, size in one.working.items():
            cells = [role, part]
            for now in shown:
                cells.append(readable_bytes(size) if role == now else "-")
            rows.append(tuple(cells))
    totals = [readable_bytes(own[name]) for name in shown]
    rows.append(("", "in all", *totals))
    header = [f"role on {', '.join(names)}" if names else "role", "part"]
    for name in shown:
        header.append(name if name == EXCHANGE else f"{name} computes")
    return table(tuple(header), rows)


def _is_there(role: str, one: Footprint, part: str, now: str) -> bool:
    """Return whether a held part of a role is on the device at the moment ``now``."""
    if part not in one.leaves or role == now:
        return True
    if now == EXCHANGE:
        return part in one.moves
    return False


def _verdict(card: Card, workers: Mapping[str, Roles]) -> Iterator[str]:
    filling = None
    if card.workers:
        filling = card.filling(next(iter(card.workers)))
    if filling is not None and card.fits:
        yield _filled(card, filling)
    if card.fits:
        yield f"It fits: {readable_bytes(card.needed)} of {readable_bytes(card.usable)}."
        return
    yield (
        f"It does not fit: {readable_bytes(card.needed - card.usable)} too much. "
        f"{advice(card.memory, workers)}"
    )


def _filled(card: Card, one: Footprint) -> str:
    assert one.fills is not None
    size = one.held[one.fills]
    share = sum(one.held.values()) / card.memory
    rows = 0
    if one.least:
        rows = size // one.least
    many = f"{rows:,} row{'' if rows == 1 else 's'} of the greatest length"
    return (
        f"{one.fills} of {readable_bytes(size)}: {many} at once; the engine takes {share:.2f} of "
        "the accelerator"
    )


def advice(memory: int, workers: Mapping[str, Roles]) -> str:
    """Return what to change so that everything fits, in its order, with the bytes that each step
    comes to.
    """
    steps = list(remedies(memory, workers))
    # of a number that falls, the last
    last: dict[str, str] = {}
    for setting, card in steps:
        key, _, _ = setting.partition("=")
        last.pop(key, None)
        last[key] = f"{setting} ({readable_bytes(card.needed)})"
    lines = list(last.values())
    if steps and steps[-1][1].fits:
        return "Change, in this order, until it fits:\n  " + "\n  ".join(lines)
    if not steps:
        return f"No setting lowers it: {_MORE}."
    return (
        "All of this lowers it and does not suffice:\n  "
        + "\n  ".join(lines)
        + f"\n{_MORE[0].upper()}{_MORE[1:]}."
    )


def refusal(label: str, memory: int, workers: Mapping[str, Roles]) -> str | None:
    """Return why the workers cannot run on an accelerator of ``memory`` bytes, and what to
    change; None if they can.
    """
    card = fill(memory, workers)
    if card.fits:
        return None
    worker = max(card.workers, key=lambda name: peak(card.workers[name]))
    own = moments(card.workers[worker])
    now = max(own, key=lambda name: own[name])
    roles = card.workers[worker]
    sizes = {}
    if now in roles:
        for part, size in roles[now].working.items():
            sizes[f"{now}'s {part}"] = size
    for name, one in roles.items():
        for part, size in one.held.items():
            if _is_there(name, one, part, now):
                sizes[f"{name}'s {part}"] = size
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:4]
    parts = ", ".join(f"{name} {readable_bytes(size)}" for name, size in largest)
    return (
        f"{label} need {readable_bytes(card.needed)} of an accelerator with "
        f"{readable_bytes(memory)}, of which {readable_bytes(card.usable)} are for roles, while "
        f"{now if now == EXCHANGE else f'{now!r} computes'} (largest: {parts}). "
        f"{advice(memory, workers)}"
    )


def summary(groups: Mapping[str, tuple[str, Roles]]) -> str:
    """Return a table of what each group of workers needs, and on which accelerators of the common
    sizes it fits.

    ``groups`` has label, roles' names and roles of a worker that has an accelerator to itself.
    """
    rows = []
    for label, (names, roles) in groups.items():
        cells = []
        for memory in COMMON.values():
            card = fill(memory, {label: roles})
            if not card.fits:
                cells.append(f"{readable_bytes(card.needed)} of {readable_bytes(card.usable)}")
                continue
            one = card.filling(label)
            rows_at_once = 0
            if one is not None and one.least:
                rows_at_once = one.held[one.fills or ""] // one.least
            cells.append(f"fits, {rows_at_once:,} rows" if rows_at_once else "fits")
        rows.append((label, names, *cells))
    return table(("workers", "roles", *COMMON), rows)


def card_as_data(memory: int, workers: Mapping[str, Roles]) -> dict[str, Any]:
    """Return the accelerator as plain data: bytes by role and part at each moment, and what to
    change.
    """
    card = fill(memory, workers)
    by_worker = {}
    for worker, roles in card.workers.items():
        by_role = {role: _footprint_as_data(one) for role, one in roles.items()}
        by_worker[worker] = {"moments": moments(roles), "roles": by_role}
    changes = []
    if not card.fits:
        for setting, after in remedies(memory, workers):
            changes.append({"setting": setting, "needed": after.needed})
    return {
        "memory": memory,
        "usable": card.usable,
        "needed": card.needed,
        "fits": card.fits,
        "workers": by_worker,
        "remedies": changes,
    }


def _footprint_as_data(one: Footprint) -> dict[str, Any]:
    return {
        "held": dict(one.held),
        "working": dict(one.working),
        "leaves": list(one.leaves),
        "moves": list(one.moves),
    }
