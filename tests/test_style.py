"""One statement does one thing: how often each room packs several into one, which may only become
less.

Counts, of every file by its syntax, what makes a line be read twice. A room over its limit fails
with the places; a room under its limit fails too, until the limit is lowered: so no count ever
rises again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HABITS = (
    "packed assignment",
    "walrus",
    "nested ternary",
    "and/or as a value",
    "f(*name)",
    "six positional arguments",
)
"""``a, b = x, y``; ``:=`` outside the condition of an if, a while or a comprehension; a ternary in
a ternary; ``x = a or b`` and ``return a and b``; a call with ``*name``; and one with six or more
positional arguments."""
LIMITS = {
    "algorithms": (0, 0, 0, 0, 0, 0),
    "commands": (0, 0, 0, 0, 0, 0),
    "comms": (0, 0, 0, 0, 0, 0),
    "config": (0, 0, 0, 0, 0, 0),
    "context": (0, 0, 0, 0, 0, 0),
    "coordinator": (0, 0, 0, 0, 2, 0),
    "datasets": (0, 0, 0, 0, 0, 0),
    "devices": (0, 0, 0, 0, 0, 1),
    "driver": (0, 0, 0, 0, 0, 0),
    "environments": (0, 0, 0, 0, 4, 0),
    "estimates": (0, 0, 0, 0, 0, 0),
    "http_client": (0, 0, 0, 0, 0, 0),
    "images": (0, 0, 0, 0, 0, 0),
    "models": (0, 0, 0, 0, 0, 0),
    "nodes": (0, 0, 0, 0, 0, 0),
    "observe": (0, 0, 0, 0, 1, 0),
    "planner": (0, 0, 0, 0, 0, 0),
    "recipes": (0, 0, 0, 0, 0, 0),
    "rewards": (0, 0, 0, 0, 4, 3),
    "rollout": (0, 0, 0, 0, 5, 0),
    "runs": (0, 0, 0, 0, 0, 0),
    "scheduler": (0, 0, 0, 0, 0, 0),
    "siirl_dask": (0, 0, 0, 0, 1, 0),
    "siirl_storage": (0, 0, 0, 0, 10, 0),
    "tables": (0, 0, 0, 0, 0, 0),
    "tasks": (0, 0, 0, 0, 0, 0),
    "testing": (0, 0, 0, 0, 7, 7),
    "training": (0, 0, 0, 0, 13, 5),
    "views": (0, 0, 0, 0, 2, 0),
    "wording": (0, 0, 0, 0, 0, 0),
    "worker": (0, 0, 0, 0, 0, 0),
}
"""Counts of each habit, by room: as many as there are. The modules outside rooms are the room
``siirl_dask``.

Most calls with ``*name`` that are left pass on the arguments of a wrapper's own caller, turn rows
into columns (``zip(*rows)``), or call what takes its items one by one: ``asyncio.gather``, rows of
rich's tables, command lines. Six positional arguments that are left are those of programs, of the C
library and of kernels."""
LINES = 450
"""Most lines of a file: a longer one is cut where a reader can stop."""
MODULES = 20
"""Most modules of a folder, besides its ``__init__``."""
CONDITIONS = (ast.If, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def in_conditions(tree: ast.AST) -> set[ast.AST]:
    """Every piece of the conditions of ifs, whiles and comprehensions."""
    conditions: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, CONDITIONS):
            conditions.append(node.test)
        elif isinstance(node, ast.comprehension):
            conditions.extend(node.ifs)
    return {piece for condition in conditions for piece in ast.walk(condition)}


def is_packed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    return isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(node.targets[0].elts)


def habits(source: str) -> Iterator[tuple[str, int]]:
    """Each habit that a file has, as often as it has it, with the line."""
    tree = ast.parse(source)
    conditions = in_conditions(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Assign() if is_packed(node):
                yield "packed assignment", node.lineno
            case ast.Assign(value=ast.BoolOp()) | ast.Return(value=ast.BoolOp()):
                yield "and/or as a value", node.lineno
            case ast.NamedExpr() if node not in conditions:
                yield "walrus", node.lineno
            case ast.IfExp(test=test, body=body, orelse=orelse):
                if any(
                    isinstance(piece, ast.IfExp)
                    for part in (test, body, orelse)
                    for piece in ast.walk(part)
                ):
                    yield "nested ternary", node.lineno
            case ast.Call(args=args):
                if any(isinstance(x, ast.Starred) and isinstance(x.value, ast.Name) for x in args):
                    yield "f(*name)", node.lineno
                if sum(not isinstance(x, ast.Starred) for x in args) >= 6:
                    yield "six positional arguments", node.lineno


def room_of(path: Path) -> str:
    """The top-level folder of the package that a file is in; ``siirl_dask`` for the modules
    outside all folders.
    """
    parts = path.relative_to(ROOT).parts
    if parts[0] == "storage":
        return parts[1]
    return parts[1] if len(parts) > 2 else parts[0]


@cache
def found() -> dict[str, dict[str, list[str]]]:
    """The places of each habit, by room."""
    rooms: dict[str, dict[str, list[str]]] = {}
    for package in ("siirl_dask", "storage/siirl_storage"):
        for path in sorted((ROOT / package).rglob("*.py")):
            room = rooms.setdefault(room_of(path), {habit: [] for habit in HABITS})
            for habit, line in habits(path.read_text()):
                room[habit].append(f"{path.relative_to(ROOT)}:{line}")
    return rooms


def test_every_room_has_a_limit_and_none_is_left_of_a_room_that_is_gone():
    assert sorted(LIMITS) == sorted(found())


@pytest.mark.parametrize("room", sorted(LIMITS))
def test_a_room_packs_no_more_into_a_statement_than_before(room):
    wrong = []
    for habit, limit, places in zip(HABITS, LIMITS[room], found()[room].values(), strict=True):
        if len(places) > limit:
            wrong.append(
                f"{room} has {len(places)} times {habit}, at most {limit} allowed: "
                f"{' '.join(places)}"
            )
        elif len(places) < limit:
            wrong.append(f"lower the limit of {room} to {len(places)} for {habit}, from {limit}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = 1, 2", ["packed assignment"]),
        ("a, b = f()", []),
        ("if (a := f()) is not None: pass", []),
        ("while a := f(): pass", []),
        ("[a for b in c if (a := f(b))]", []),
        ("f(a := 1)", ["walrus"]),
        ("b = 1 if (a := f()) else 2", ["walrus"]),
        ("a if b else c if d else e", ["nested ternary"]),
        ("a if b else c", []),
        ("a = b or c", ["and/or as a value"]),
        ("def f():\n    return a and b", ["and/or as a value"]),
        ("if a and b: pass", []),
        ("f(*given)", ["f(*name)"]),
        ("f(*(a for a in b))", []),
        ("f(1, 2, 3, 4, 5, 6)", ["six positional arguments"]),
        ("f(1, 2, 3, 4, 5, x=6)", []),
    ],
)
def test_what_counts_as_which_habit(source, expected):
    assert [habit for habit, _ in habits(source)] == expected


def test_no_file_and_no_folder_is_longer_than_a_reader_follows():
    folders: dict[str, int] = {}
    long = []
    for package in ("siirl_dask", "storage/siirl_storage"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                folder = path.parent.relative_to(ROOT).as_posix()
                folders[folder] = folders.get(folder, 0) + 1
            lines = len(path.read_text().splitlines())
            if lines > LINES:
                long.append(f"{path.relative_to(ROOT)} has {lines} lines, at most {LINES} allowed")
    assert not long, "\n".join(long)
    assert {folder: count for folder, count in folders.items() if count > MODULES} == {}


def test_no_class_name_stands_for_two_things():
    homes: dict[str, list[str]] = {}
    for path in sorted([*(ROOT / "siirl_dask").rglob("*.py"), *(ROOT / "storage").rglob("*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert len(homes) > 500
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
