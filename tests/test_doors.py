"""Rooms have doors: what other rooms import of a room is what its ``__init__`` names in
``__all__``.

A name there is one that the ``__init__`` itself has, or a module of the room that stands open as a
whole, such as ``accelerator`` of ``siirl_dask.devices``. A room inside a room has a door of its
own. How many modules of a room stand open may only become less: each is one that a reader of
another room has to know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests import parsed
from tests.parsed import PACKAGES, ROOT
from tests.test_layers import imported, modules, part_of

LOOKS_INSIDE = {"testing"}
"""Rooms that may pass a door: a pool of workers in one process is made of what a worker is made
of."""
STORAGE = {"committed", "digests", "exact_names", "files", "formats", "parts", "reading"}
"""Modules of siirl_storage that stand open; its ``__all__`` is for those who have it alone."""
OPEN = {
    "commands": 5,
    "comms": 6,
    "config": 3,
    "coordinator": 11,
    "datasets": 2,
    "devices": 10,
    "driver": 14,
    "environments": 1,
    "estimates": 9,
    "images": 8,
    "models": 19,
    "nodes": 3,
    "observe": 8,
    "planner": 8,
    "recipes": 6,
    "rewards": 2,
    "rollout": 7,
    "runs": 29,
    "scheduler": 1,
    "siirl_storage": 7,
    "tables": 1,
    "training": 10,
    "views": 21,
    "worker": 23,
}
"""Modules of each room that stand open, those of rooms inside it as well."""


@cache
def doors() -> dict[str, frozenset[str]]:
    """Return what each room's ``__init__`` names in ``__all__``, also of rooms inside rooms."""
    found = {}
    for module, path in modules().items():
        if path.name != "__init__.py":
            continue
        named: list[str] = []
        for node in parsed.tree_of(path).body:
            match node:
                case ast.Assign([ast.Name("__all__")], value):
                    named = ast.literal_eval(value)
        found[module] = frozenset(named)
    found["siirl_storage"] |= STORAGE
    return found


def open_modules(room: str) -> Iterator[str]:
    """Yield the full names of the modules of a room that stand open."""
    there = modules()
    for name in sorted(doors()[room]):
        module = f"{room}.{name}"
        if module not in there or name in exported(room):
            continue
        yield module
        if module in doors():
            yield from open_modules(module)


@cache
def exported(room: str) -> frozenset[str]:
    """Return the functions and classes that a room's ``__init__`` has itself: one may have its module's
    name.
    """
    names: set[str] = set()
    for node in parsed.tree_of(modules()[room]).body:
        match node:
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return frozenset(names)


def closed_door(name: str) -> str | None:
    """Return the room past whose door an imported name goes; None if it goes through all."""
    parts = name.split(".")
    first = 1 if parts[0] == "siirl_storage" else 2
    for end in range(first, len(parts)):
        room = ".".join(parts[:end])
        if room not in doors():
            return None  # a module: all doors before it are passed
        if parts[end] not in doors()[room]:
            return room
    return None


@cache
def rooms() -> list[str]:
    return sorted(
        name for name in doors() if name.count(".") == (name.split(".")[0] == "siirl_dask")
    )


def test_imports_come_through_doors() -> None:
    wrong = []
    for path in parsed.files_below(*PACKAGES):
        own = part_of(path)
        if own in LOOKS_INSIDE:
            continue
        for line, name in imported(path):
            target = name.split(".")
            if target[0] not in ("siirl_dask", "siirl_storage"):
                continue
            room = target[0] if target[0] == "siirl_storage" else ".".join(target[:2])
            if room not in doors() or room.split(".")[-1] == own:
                continue
            closed = closed_door(name)
            if closed is not None:
                where = f"{path.relative_to(ROOT)}:{line}"
                wrong.append(f"{where} imports {name}, which {closed} does not name in __all__")
    assert not wrong, (
        "use what a room names, move what you need to where it is used, or export the name:\n"
        + "\n".join(wrong)
    )


@pytest.mark.parametrize("room", [room.split(".")[-1] for room in rooms()])
def test_no_more_modules_stand_open_than_before(room: str) -> None:
    full = room if room == "siirl_storage" else f"siirl_dask.{room}"
    found = list(open_modules(full))
    limit = OPEN.get(room, 0)
    assert len(found) <= limit, f"{room} has {len(found)} open modules, at most {limit}: {found}"
    assert len(found) == limit, f"lower the number of open modules of {room} to {len(found)}"


def test_no_module_stands_open_for_nobody() -> None:
    used: set[str] = set()
    for path in parsed.files_below(*PACKAGES):
        own = part_of(path)
        for _, name in imported(path):
            if name.split(".")[1:2] != [own] and not name.startswith(f"{own}."):
                parts = name.split(".")
                used |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    unused = {module for room in rooms() for module in open_modules(room) if module not in used}
    assert unused == set(), "nothing outside imports them: close the door"
