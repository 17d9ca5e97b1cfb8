"""Plants faults in rooms of the package, one at a time, and prints which test finds each.

    python benchmarks/mutants.py siirl_dask/planner [MORE ...] [--number 12] [--seed 0] [--pick 3 7]

A fault is a small change of one expression or statement: a comparison off by one, a condition negated, a statement
left out. Number and seed choose the same faults as long as the rooms' files do not change. Each is written into a copy
of the tree. There the test files run that the fewest imports lead from, without processes and to the first failure. At
the end those tests that have failed run without a fault. `--pick` plants single faults of the table again, after a test
was written for them.

mutmut and cosmic-ray do this for packages whose tests take seconds: mutmut runs all tests twice before its first fault
and changes nothing outside of functions, cosmic-ray has one command of tests for all and changes the tree itself.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from siirl_dask.models.broken_imports import hide  # noqa: E402
from tests.select_tests import LOADED, ROOTS, graph_of, is_test, python_files, reaching, read  # noqa: E402

PRELOADED = ("hypothesis", "numpy", "pyarrow", "pyarrow.parquet", "torch")
"""Imported once, ahead of all faults, if a file of the tree imports them."""
LEFT_OUT = ("tests/e2e/", "tests/hosts/", "tests/gpu/")
"""Folders of tests that need processes or devices."""
COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "runs-*")
UNMARKED = "not alone and not gpu and not slow and not sweep"
OPTIONS = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", UNMARKED)
ENDED = "its process ended"
NOT_RUN = "pytest did not begin"
PATIENCE = 600.0  # seconds for all tests that found something, without a fault
STARTING = 60.0  # seconds beside those of the tests: imports, collection
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.Div, ast.Mult), (ast.And, ast.Or)),
)
NEIGHBOURS: dict[type[Any], type[Any]] = {
    ast.FloorDiv: ast.Mult,
    **dict(PAIRS),
    **{other: one for one, other in PAIRS},
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
RETURNED = {
    "bool": "not ({})",
    **dict.fromkeys(("int", "float", "Tensor", "torch.Tensor"), "({}) + 1"),
    **dict.fromkeys(("list", "tuple", "Sequence"), "({})[1:]"),
}
"""The result in place of a result, by the annotation."""


@dataclass(frozen=True, slots=True)
class Fault:
    path: str
    name: str
    """The function or class of the module that it is in; empty outside of these."""
    kind: str
    line: int
    begin: int
    """Where the replaced text begins in the file, in bytes; ``end`` likewise."""
    end: int
    before: str
    after: str


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all in it but annotations, texts, and what type checkers alone read."""
    yield node
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        if (
            isinstance(node, ast.If)
            and name == "body"
            and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if name == "decorator_list" and ast.unparse(child).startswith("dataclass"):
                continue
            if isinstance(child, ast.AST):
                yield from parts(child)


def changes(tree: ast.stmt) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield the kind of each change, the node that it replaces, and the text in its place."""
    defaults = set()
    for node in parts(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defaults.update(map(id, [*node.args.defaults, *node.args.kw_defaults]))
            yield from _returns(node)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield "condition", test, f"(not ({ast.unparse(test)}))"
        elif isinstance(node, ast.stmt):
            if _can_go(node):
                yield "deleted", node, "pass"
        elif isinstance(node, ast.expr):
            changed = _changed(node)
            if changed is not None:
                kind = "default" if id(node) in defaults else type(node).__name__.lower()
                yield kind, node, f"({ast.unparse(changed)})"


def _returns(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, ast.expr, str]]:
    annotation = "" if function.returns is None else ast.unparse(function.returns)
    form = RETURNED.get(annotation.partition("[")[0])
    if annotation.endswith("| None"):
        form = "None"
    inner = [part for part in parts(function) if isinstance(part, ast.FunctionDef | ast.Lambda)]
    if form is None or len(inner) > 1:
        return
    for part in parts(function):
        if isinstance(part, ast.Return) and part.value is not None:
            text = ast.unparse(part.value)
            if text != "None":
                yield "return", part.value, form.format(text)


def _can_go(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            return True
        case ast.Continue() | ast.Break() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _changed(node: ast.expr) -> ast.expr | None:
    """Return a neighbour of an expression, or None where it has none."""
    after: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator]):
            after.ops = [NEIGHBOURS[type(operator)]()]
        case ast.BinOp(left, operator, right) if type(operator) in NEIGHBOURS:
            if any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                return None
            after.op = NEIGHBOURS[type(operator)]()
        case ast.BoolOp(operator):
            after.op = NEIGHBOURS[type(operator)]()
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            return operand
        case ast.Call(ast.Name(name)) if name in CALLED:
            after.func = ast.Name(CALLED[name])
        case ast.Constant(bool(value)):
            after.value = not value
        case ast.Constant(int(value)) | ast.Constant(float(value)):
            after.value = value + 1
        case _:
            return None
    return after


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def faults_of(path: str, code: bytes) -> Iterator[Fault]:
    """Yield the faults that a file can get."""
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in ast.parse(code).body:
        name = getattr(statement, "name", "")
        for kind, node, after in changes(statement):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = " ".join(code[begin:end].decode().split())
            yield Fault(path, name, kind, node.lineno, begin, end, before, after)


def choose(faults: Sequence[Fault], number: int, seed: int) -> list[Fault]:
    """Draw faults, each kind in turn."""
    waiting: dict[str, list[Fault]] = {}
    for fault in random.Random(seed).sample(faults, len(faults)):
        waiting.setdefault(fault.kind, []).append(fault)
    chosen: list[Fault] = []
    while any(waiting.values()) and len(chosen) < number:
        chosen += [waiting[kind].pop() for kind in sorted(waiting) if waiting[kind]]
    return chosen[:number]


def nearest(
    fault: Fault, graph: Mapping[str, set[str]], sources: Mapping[str, bytes], number: int
) -> list[str]:
    """Return the test files from which the fewest imports lead to a fault: first those that name
    its function or class, then those named after its module, then those of its room's folder.
    """
    distances = reaching(graph, [fault.path, fault.path + LOADED])
    found = [test for test in distances if test.endswith(".py") and is_test(test)]
    found = [test for test in found if not test.startswith(LEFT_OUT)]
    room = f"tests/{Path(fault.path).parts[1]}/"
    module = f"test_{Path(fault.path).stem}"
    word = re.compile(rb"\b%s\b" % (fault.name or "-").encode())
    naming = {test for test in found if word.search(sources[test])}

    def order(test: str) -> tuple[bool, bool, bool, int, str]:
        return test not in naming, module not in test, room not in test, distances[test], test

    return sorted(found, key=order)[:number]


class Reporter:
    """Tells of failures, and begins no test after some seconds. A plugin of pytest."""

    def __init__(self, seconds: float) -> None:
        self.failed: list[str] = []
        self.tests = 0
        self._until = time.monotonic() + seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._until:
            item.session.shouldstop = "the seconds of this fault are over"


def is_of_tree(entry: Path) -> bool:
    """Return whether modules of this tree are found there; its environment may lie in it."""
    return entry.is_relative_to(ROOT) and not entry.is_relative_to(sys.prefix)


def run_tests(tree: Path, arguments: Sequence[str], seconds: float, end: Connection) -> None:
    """In a process of its own: run tests of the copy, and send those that failed and how many
    passed.
    """
    os.setsid()
    os.chdir(tree)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]
    own = [str(tree), str(tree / "storage")]
    sys.path[:] = own + [entry for entry in sys.path if not is_of_tree(Path(entry or "."))]
    os.environ["PYTHONPATH"] = os.pathsep.join(own)
    importlib.invalidate_caches()
    reporter = Reporter(seconds)
    code = pytest.main([*OPTIONS, *arguments], plugins=[reporter])
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
        reporter.failed.append(NOT_RUN)
    end.send((reporter.failed, reporter.tests))
    end.close()
    os._exit(0)


def outcome(tree: Path, arguments: Sequence[str], seconds: float) -> tuple[list[str], int] | None:
    """Return the tests that failed, and how many passed; None where they took too long."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_tests, args=(tree, arguments, seconds, sending))
    process.start()
    sending.close()
    result: tuple[list[str], int] | None = None
    if receiving.poll(seconds + STARTING):
        try:
            result = receiving.recv()
        except EOFError:
            result = ([ENDED], 0)
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return result


def write(path: Path, code: bytes) -> None:
    """Write a module, and forget what Python compiled of it: that it knows by second and size."""
    path.write_bytes(code)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="+", metavar="ROOM", help="folders or files, from the root")
    parser.add_argument("--number", type=int, default=12, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pick", type=int, nargs="+", help="numbers of faults of the table")
    parser.add_argument("--files", type=int, default=8, help="test files for each fault")
    parser.add_argument("--seconds", type=float, default=90, help="of tests, for each fault")
    parser.add_argument("--processes", action="store_true", help="tests that start some, too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    sources = {path: (root / path).read_bytes() for path in python_files(root)}
    rooms = tuple(f"{room.rstrip('/')}/" for room in arguments.rooms)
    inside = [path for path in sources if f"{path}/".startswith(rooms)]
    faults = [fault for path in inside for fault in faults_of(path, sources[path])]
    if not faults:
        parser.error(f"{' '.join(rooms)}: no module there that can get a fault, below {root}")
    graph = graph_of({path: read(path, code) for path, code in sources.items()})
    options = [] if arguments.processes else ["--no-processes"]
    if arguments.processes:
        hide()
        importlib.import_module("transformers.models.llama.modeling_llama")
    for name in PRELOADED:
        if any(f"import {name}".encode() in code for code in sources.values()):
            importlib.import_module(name)
    chosen = dict(enumerate(choose(faults, arguments.number, arguments.seed), start=1))
    if not set(arguments.pick or ()) <= set(chosen):
        parser.error(f"--pick {arguments.pick}: there are faults 1 to {len(chosen)}")
    print("| fault | before | after | found by |\n| --- | --- | --- | --- |", flush=True)
    finding: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(root, tree, ignore=COPIED, symlinks=True)
        for number in arguments.pick or chosen:
            fault = chosen[number]
            code = sources[fault.path]
            write(tree / fault.path, code[: fault.begin] + fault.after.encode() + code[fault.end :])
            tests = nearest(fault, graph, sources, arguments.files)
            result: tuple[list[str], int] | None = ([], 0)
            if tests:
                result = outcome(tree, ["-x", *options, *tests], arguments.seconds)
            write(tree / fault.path, code)
            if result is None:
                found = "**timed out**"
            elif result[0]:
                found = result[0][0]
                finding.add(found)
            else:
                found = f"**survived** {result[1]} tests of {len(tests)} files"
            cells = [f"{number}: {fault.path}:{fault.line}", fault.before, fault.after, found]
            print(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |", flush=True)
        finding.discard(ENDED)
        result = outcome(tree, [*options, *sorted(finding)], PATIENCE) if finding else ([], 0)
    failing = ["not known, they took too long"] if result is None else result[0]
    print("\nThese fail without a fault, too:", ", ".join(failing) or "none")


if __name__ == "__main__":
    main()
