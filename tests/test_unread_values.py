"""A function reads what it sets: its variables, and what it puts into dicts and lists of its own.

Two lines in the wrong order are found by this alone where no test runs them, such as an option that
is put into a dict after the call that takes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
AGAIN = (ast.For, ast.AsyncFor, ast.While, ast.Try)
"""Statements that may go on with a line above: a read in one counts until its end."""
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
METHODS = ("append", "extend", "add", "update", "setdefault", "insert")


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, SCOPES):
            yield node
            yield from own_nodes(node)


def changed(node: ast.AST) -> ast.Name | None:
    """Return the variable whose dict, list or set a statement changes."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name() as name)]):
            return name
        case ast.AugAssign(target=ast.Name() | ast.Subscript(value=ast.Name()) as target):
            inner = target.value if isinstance(target, ast.Subscript) else target
            return inner if isinstance(inner, ast.Name) else None
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as name, attr=method))):
            return name if method in METHODS else None
    return None


def names_read(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the variables that are read in a node."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Store):
            yield inner


def unread(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int]]:
    """Yield each variable of a function that is set, or whose dict, list or set is changed, after it
    was read for the last time, with the line.
    """
    own = list(own_nodes(function))
    shared = {
        name for node in own if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
    }
    containers = set()
    writes: list[tuple[str, int]] = []
    for node in own:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                writes.append((name, node.lineno))
                if isinstance(value, CONTAINERS):
                    containers.add(name)
    changes = [name for node in own if (name := changed(node)) is not None]
    changes = [name for name in changes if name.id in containers]
    writes += [(name.id, name.lineno) for name in changes]
    no_reads = {id(name) for name in changes}
    last_reads: dict[str, int] = {}
    for node in ast.walk(function):
        until = 0
        if isinstance(node, AGAIN):
            until = node.end_lineno or 0
        elif not isinstance(node, SCOPES):
            continue
        elif node is not function:
            until = function.end_lineno or 0  # it may be called at any time
        for name in names_read(node):
            if id(name) not in no_reads:
                last_reads[name.id] = max(last_reads.get(name.id, 0), name.lineno, until)
    for name, line in writes:
        if name not in shared and line > last_reads.get(name, 0):
            yield name, line


def unread_in(source: str) -> list[tuple[str, int]]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]
    return [found for function in functions for found in unread(function)]


@pytest.mark.parametrize("package", ["siirl_dask", "storage/siirl_storage"])
def test_what_a_function_sets_it_reads_afterwards(package):
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for name, line in unread_in(path.read_text()):
            found.append(f"{path.relative_to(ROOT)}:{line} sets {name}, which nothing reads then")
    assert not found, "\n".join(found)


LATE_OPTION = """
def attend(sinks):
    options = {}
    output = kernel(**options)
    if sinks is not None:
        options["return_aux"] = True
        output = output[0]
    return output
"""
IN_A_LOOP = """
def rows(items):
    last = None
    for item in items:
        if item == last:
            yield item
        last = item
"""
IN_A_CLOSURE = """
def clock():
    now = 0.0
    def read():
        return now
    wait(read)
    now = 1.0
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LATE_OPTION, [("options", 6)]),
        (LATE_OPTION.replace("    output = kernel", "    output: Any = kernel"), [("options", 6)]),
        (LATE_OPTION.replace("output[0]", "options['output']"), []),
        ("def f(a):\n    b = a\n    g(b)\n    b = 2", [("b", 4)]),
        ("def f(a):\n    b = []\n    g(b)\n    b.append(a)", [("b", 4)]),
        ("def f(a):\n    b = []\n    g(b)\n    b += a", [("b", 4)]),
        ("def f(b):\n    g(b)\n    b['a'] = 1", []),
        ("def f():\n    b = g()\n    b['a'] = 1", []),
        ("def f(a):\n    b = []\n    b.append(a)\n    return b", []),
        ("def f():\n    global b\n    b = 2", []),
        (IN_A_LOOP, []),
        (IN_A_CLOSURE, []),
    ],
)
def test_what_counts_as_read(source, expected):
    assert unread_in(source) == expected
