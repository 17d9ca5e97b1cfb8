"""A test runs apart from the program, and calls it as if it were there."""

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import pytest

from siirl_dask.errors import ConfigError
from siirl_dask.rewards import code_execution
from siirl_dask.rewards.code_execution import places
from siirl_dask.rewards.code_execution.inside.values import decode, encode
from siirl_dask.rewards.code_execution.sandbox import SandboxLimits, output, passes, passes_together

pytestmark = pytest.mark.usefixtures("isolation")
QUICK = SandboxLimits(seconds=5.0)
PROGRAM = """
import math
from collections import Counter, deque, namedtuple
from dataclasses import dataclass
LIMIT = 3
class Wrong(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, key): return self.items[key]
    def __repr__(self): return f"Stack({self.items})"
@dataclass
class Node:
    value: int
    next: "Node | None" = None
def total(node):
    return node.value + total(node.next) if node else 0
def double(x): return 2 * x
def same(*values, **named): return (values, named)
def order(items): items.sort()
def fill(grid, *, done):
    grid[0][0] = 7
    done["yes"] = True
def refuse(x): raise Wrong(f"not {x}") if x else ZeroDivisionError("zero")
def count():
    n = 0
    while True:
        yield n
        n += 1
def letters(text): return Counter(text)
def apply(function, items): return [function(item) for item in items]
def sorted(items): return "mine"
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert double(2) == 4 and double('ab') == 'abab' and double(2**70) == 2**71",
        "assert same(1, (2, [3.5, None]), {4, 5}, b'6', key={(7, 8): frozenset({9})})[0][1] == (2, "
        "[3.5, None])",
        "assert LIMIT == 3",
        "items = [3, 1, 2]; alias = items; order(items); assert alias == [1, 2, 3]",
        "grid, done = [[0]], {}; fill(grid, done=done); assert grid == [[7]] and done == {'yes': "
        "True}",
        "s = Stack(); assert s.push(1).push(2) is s and len(s) == 2 and s[0] == 1 and s.pop() == 2",
        "assert repr(Stack()) == 'Stack([])' and list(Stack().push(4)) == [4] and not Stack()",
        "assert isinstance(Stack(), Stack) and not isinstance(Stack(), Node) and not isinstance(4, "
        "Node)",
        "first = Node(1); first.next = Node(2); assert total(first) == 3 and first.next.value == 2",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]",
        "assert letters('aab') == {'a': 2, 'b': 1}",
        "assert apply(str, [1, 2]) == ['1', '2'] and apply(len, ['abc']) == [3]",
        "assert math.isclose(double(0.1) + 0.1, 0.3)",
        "try: refuse(0)\nexcept ZeroDivisionError as error: assert str(error) == 'zero'\nelse: "
        "assert False",
        "try: refuse(1)\nexcept Wrong as error: assert str(error) == 'not 1'\nelse: assert False",
        "from solution import double as twice\nassert twice(3) == 6",
        "def check(candidate):\n    for n in range(20): assert candidate(n) == n + "
        "n\ncheck(double)",
        "assert sorted([2, 1]) == [1, 2]",
    ],
)
def test_a_test_may_use_what_a_program_has(test):
    assert passes(PROGRAM, test, QUICK)


@pytest.mark.parametrize(
    "test",
    [
        "assert double(2) == 5",
        "assert Stack() == 0",
        "assert nothing(1)",
        "assert double",
        "refuse(1)",
        "double()",
    ],
)
def test_what_is_wrong_does_not_pass(test):
    assert passes(PROGRAM, test, QUICK) == (test == "assert double")


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert apply(lambda x: x + 1, [1]) == [2]", "passes a function to the program"),
        ("class Tree: pass\nassert double(Tree())", "passes a value of type Tree to the program"),
        ("assert double(2) = 4", "is not Python"),
    ],
)
def test_a_test_that_must_share_memory_is_refused_by_name(test, why):
    with pytest.raises(
        ValueError, match=rf"cannot be run apart from the program: it {why}.*forgeable=True"
    ):
        code_execution("p", f"```python\n{PROGRAM}\n```", test)


def test_a_test_that_must_share_memory_runs_beside_the_program_when_that_is_asked_for():
    tests = [
        "assert apply(lambda x: x + 1, [1]) == [2]",
        "assert Node(1) == Node(1)",
        "assert double(2) == 5",
    ]
    assert code_execution("p", f"```python\n{PROGRAM}\n```", tests, forgeable=True) == 2 / 3
    forged = (
        "import sys, os\nf = sys._getframe(1)\nos.write(f.f_locals['answer'], "
        "f.f_locals['task']['token'].encode())"
    )
    assert passes_together(forged + "\nos._exit(0)", "assert False", QUICK)  # which its name says


def test_large_values_go_both_ways():
    assert passes(
        "def same(x): return x",
        "x = list(range(10**6)); assert same(x) == x",
        SandboxLimits(seconds=20.0),
    )


def test_a_readable_folder_is_seen_by_the_program(tmp_path):
    (tmp_path / "data").write_text("4")
    tmp_path.chmod(0o755)
    response = f"```python\nprint(open({str(tmp_path / 'data')!r}).read())\n```"
    case = {"input": "", "output": "4"}
    assert code_execution("p", response, case, readable=[str(tmp_path)]) == 1.0
    assert code_execution("p", response, case) == 0.0
    with pytest.raises(
        ConfigError, match="readable names 'data': expected the absolute path of a file or folder"
    ):
        code_execution("p", response, case, readable=["data"])


@pytest.mark.parametrize("isolate", ["docker", "bwrap", 2, None])
def test_an_unknown_sandbox_is_refused_by_name(isolate):
    with pytest.raises(
        ConfigError,
        match=f"isolate={isolate!r}: expected one of True, namespaces, bubblewrap, runsc, False",
    ):
        code_execution("p", "```python\n```", "1", isolate=isolate)


def test_a_sandbox_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ConfigError, match="takes the program bwrap, which is not on PATH: install it"
    ):
        code_execution("p", "```python\n```", "1", isolate="bubblewrap")


def test_the_folder_that_is_closed_to_other_users_is_found_wherever_python_or_the_package_lies(
    tmp_path, monkeypatch
):
    closed = tmp_path / "closed"
    deeper = closed / "deeper"
    deeper.mkdir(parents=True)
    closed.chmod(0o700)
    monkeypatch.setattr(places, "_HERE", "/usr/lib")
    monkeypatch.setattr("sys.executable", "/usr/bin/env")
    for name in ("sys.prefix", "sys.base_prefix"):
        monkeypatch.setattr(name, "/usr")
    assert places.closed_folder() is None
    for name in ("sys.executable", "sys.prefix", "sys.base_prefix"):
        with monkeypatch.context() as context:
            context.setattr(name, str(deeper / "python"))
            assert places.closed_folder() == str(closed)
    monkeypatch.setattr(places, "_HERE", str(deeper / "code_execution"))
    assert places.closed_folder() == str(closed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs run as another user")
def test_a_folder_that_is_closed_to_roots_programs_is_named(tmp_path, monkeypatch):
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text("#!/bin/sh\necho 'bwrap: Permission denied' >&2\nexit 1\n")
    bubblewrap.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(gettempdir()):
            break
        folder.chmod(0o755)  # root's programs start it as another user
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(places, "program_user", lambda: 54321)
    monkeypatch.setattr(places, "closed_folder", lambda: "/secret")
    with pytest.raises(
        ConfigError,
        match="Permission denied; root's programs run as another user, who may not enter /s",
    ):
        output("", "", replace(QUICK, isolate="bubblewrap"))
    monkeypatch.setattr(places, "closed_folder", lambda: None)
    with pytest.raises(ConfigError, match=r"broke with exit code 1: bwrap: Permission denied$"):
        output("", "", replace(QUICK, isolate="bubblewrap"))


def test_values_arrive_as_what_they_equal():
    values = [
        None,
        True,
        1,
        -(2**99),
        1.5,
        float("inf"),
        "é\ud800",
        [],
        (1, [2]),
        {1, 2},
        {(1,): b"x"},
        1j,
        range(3),
    ]
    assert decode(json.loads(json.dumps(encode(values, repr))), None) == values
