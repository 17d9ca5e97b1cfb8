"""Faults that ``benchmarks/mutants.py`` plants are found where a test sees them, and the tree stays
as it was.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants import choose, faults_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "mutants.py"
MODULE = """\
def above_zero(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number > 0]
"""
CONFTEST = """\
def pytest_addoption(parser):
    parser.addoption("--no-processes", action="store_true")
"""
SEES_NO_ZERO = """\
from siirl_dask.room.numbers import above_zero


def test_negative_numbers_are_left_out():
    assert above_zero([-1, 2]) == [2]
"""
FAILS_ALWAYS = """\
import siirl_dask.room.numbers


def test_that_fails():
    raise AssertionError
"""


@pytest.fixture
def plant(tmp_path):
    """Plants all faults of a tiny package with one test file; gives what is printed: the place, the
    text before and after, and the finder of each, and which tests fail without a fault.
    """

    def plant(test):
        files = {
            "siirl_dask/__init__.py": "",
            "siirl_dask/room/__init__.py": "",
            "siirl_dask/room/numbers.py": MODULE,
            "tests/conftest.py": CONFTEST,
            "tests/room/test_numbers.py": test,
            "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n',
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        command = [sys.executable, SCRIPT, "siirl_dask/room", "--root", tmp_path, "--number", "9"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        assert {name: (tmp_path / name).read_text() for name in files} == files
        table, _, failing = done.stdout.partition("\n\n")
        return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]], failing

    return plant


def test_a_fault_is_found_where_a_test_sees_it_and_survives_where_none_does(plant):
    table, failing = plant(SEES_NO_ZERO)
    found = {after: by for _, _, after, by in table}
    assert "test_negative_numbers_are_left_out" in found["(not (number > 0))"]
    assert "survived" in found["(number >= 0)"]
    assert "survived" in found["(1)"]
    assert failing == "These fail without a fault, too: none\n"


def test_a_test_that_fails_without_a_fault_is_named(plant):
    _, failing = plant(FAILS_ALWAYS)
    assert "test_numbers.py::test_that_fails" in failing


@pytest.mark.parametrize("room", ["algorithms", "coordinator", "planner"])
def test_every_fault_is_another_program_that_compiles(room):
    for path in sorted((ROOT / "siirl_dask" / room).rglob("*.py")):
        code = path.read_bytes()
        whole = ast.dump(ast.parse(code))
        for fault in choose(list(faults_of(path.name, code)), number=6, seed=0):
            changed = code[: fault.begin] + fault.after.encode() + code[fault.end :]
            assert ast.dump(ast.parse(changed)) != whole, fault
