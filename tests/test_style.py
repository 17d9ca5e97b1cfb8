"""One statement does one thing: how often each room packs several into one, which may only become
less.

Counts, of every file by its syntax, what makes a line be read twice. A room over its limit fails
with the places; a room under its limit fails too, until the limit is lowered: so no count ever
rises again. Ternaries and walruses are counted by the lines of code of their room.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import parsed
from tests.parsed import PACKAGES, ROOT, Nodes

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
RATES = {"ternary": 11.0, "walrus": 1.5}
"""Most of both a thousand lines of code that are neither blank nor a comment, conditions
included."""
DENSER = {
    "ternary": {},
    "walrus": {
        "algorithms": 2.5,
        "datasets": 4.5,
        "environments": 3.0,
        "images": 2.5,
        "observe": 2.0,
        "rollout": 2.5,
        "siirl_storage": 2.5,
        "testing": 2.0,
    },
}
"""The rooms that have more, and how many more at most: a limit only falls, and goes with the
excess."""
SLACK = 2.0
"""A room may be below its limit in ``DENSER`` by so many a thousand lines."""
LINES = 450
"""Most lines of a file: a longer one is cut where a reader can stop."""
MODULES = 20
"""Most modules of a folder, besides its ``__init__``."""


def in_conditions(nodes: Nodes) -> set[ast.AST]:
    """Every piece of the conditions of ifs, whiles and comprehensions."""
    conditions = [node.test for kind in (ast.If, ast.While) for node in nodes[kind]]
    for node in nodes[ast.comprehension]:
        conditions.extend(node.ifs)
    return {piece for condition in conditions for piece in ast.walk(condition)}


def is_packed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    return isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(node.targets[0].elts)


def habits(nodes: Nodes) -> Iterator[tuple[str, int]]:
    """Each habit that a file has, as often as it has it, with the line."""
    for node in nodes[ast.Assign]:
        if is_packed(node):
            yield "packed assignment", node.lineno
        elif isinstance(node.value, ast.BoolOp):
            yield "and/or as a value", node.lineno
    for node in nodes[ast.Return]:
        if isinstance(node.value, ast.BoolOp):
            yield "and/or as a value", node.lineno
    conditions = in_conditions(nodes) if nodes[ast.NamedExpr] else set()
    for node in nodes[ast.NamedExpr]:
        if node not in conditions:
            yield "walrus", node.lineno
    for node in nodes[ast.IfExp]:
        pieces = (piece for part in ast.iter_child_nodes(node) for piece in ast.walk(part))
        if any(isinstance(piece, ast.IfExp) for piece in pieces):
            yield "nested ternary", node.lineno
    for node in nodes[ast.Call]:
        starred = [argument for argument in node.args if isinstance(argument, ast.Starred)]
        if any(isinstance(argument.value, ast.Name) for argument in starred):
            yield "f(*name)", node.lineno
        if len(node.args) - len(starred) >= 6:
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
    for path in parsed.files_below(*PACKAGES):
        room = rooms.setdefault(room_of(path), {habit: [] for habit in HABITS})
        for habit, line in habits(parsed.nodes_of(path)):
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


@cache
def rates() -> dict[str, dict[str, float]]:
    """How many ternaries and walruses a thousand lines of code each room has."""
    lines: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in RATES}
    for path in parsed.files_below(*PACKAGES):
        room = room_of(path)
        for line in parsed.text_of(path).splitlines():
            lines[room] += bool(line.strip()) and not line.strip().startswith("#")
        counts["ternary"][room] += len(parsed.nodes_of(path)[ast.IfExp])
        counts["walrus"][room] += len(parsed.nodes_of(path)[ast.NamedExpr])
    return {
        kind: {room: 1000 * counts[kind][room] / lines[room] for room in lines} for kind in RATES
    }


@pytest.mark.parametrize("kind", RATES)
def test_conditions_in_the_middle_of_a_statement_become_no_more(kind):
    wrong = []
    for room, rate in rates()[kind].items():
        limit = DENSER[kind].get(room, RATES[kind])
        if rate > limit:
            wrong.append(f"{room} has {rate:.1f} times {kind} a thousand lines: at most {limit}")
        elif limit > max(rate + SLACK, RATES[kind]):
            wrong.append(f"lower the limit of {room} for {kind} to {rate:.1f}, from {limit}")
    assert not wrong, "\n".join(wrong)
    assert all(limit > RATES[kind] for limit in DENSER[kind].values())
    assert DENSER[kind].keys() <= LIMITS.keys()


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
    assert [habit for habit, _ in habits(parsed.by_kind(ast.parse(source)))] == expected


def test_no_file_and_no_folder_is_longer_than_a_reader_follows():
    folders: dict[str, int] = {}
    long = []
    for path in parsed.files_below(*PACKAGES):
        if path.name != "__init__.py":
            folder = path.parent.relative_to(ROOT).as_posix()
            folders[folder] = folders.get(folder, 0) + 1
        lines = len(parsed.text_of(path).splitlines())
        if lines > LINES:
            long.append(f"{path.relative_to(ROOT)} has {lines} lines, at most {LINES} allowed")
    assert not long, "\n".join(long)
    assert {folder: count for folder, count in folders.items() if count > MODULES} == {}


def test_no_class_name_stands_for_two_things():
    homes: dict[str, list[str]] = {}
    for path in parsed.files_below("siirl_dask", "storage"):
        for node in parsed.tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert len(homes) > 500
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
