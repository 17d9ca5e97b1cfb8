"""``pytest --no-processes`` starts none and imports no engine, whatever a test does; no skipped
test is silent.
"""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLE = """
import ctypes.util, multiprocessing, os, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
import pytest

MARK = Path(os.environ["MARK"])

def start():
    subprocess.run(["touch", MARK])

def test_computes():
    assert 1 + 1 == 2

def test_fails():
    assert 1 + 1 == 3

def test_starts():
    start()

def test_forks():
    if os.fork() == 0:
        MARK.touch()
        os._exit(0)

@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_spawns(how):
    multiprocessing.get_context(how).Process(target=start).start()

def test_starts_in_a_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(start).result()

def test_starts_in_a_thread_that_nobody_waits_for():
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

def test_starts_and_hides_it():
    try:
        start()
    except BaseException:
        pass

def test_finds_a_library():
    assert ctypes.util.find_library("c")

def test_imports():
    import_module("transformers")

@pytest.fixture(scope="module")
def service():
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(start).result()

@pytest.mark.parametrize("time", [1, 2])
def test_uses_a_service(service, time): ...

def test_the_end():
    assert "transformers" not in sys.modules
"""
USES = "import transformers\n\ndef test_an_engine(): ..."
RUN = """
import sys, pytest
from tests.reports import NoProcesses
sys.exit(pytest.main(sys.argv[1:], plugins=[NoProcesses()]))
"""
ENDS = """
import sys, types, pytest, tests.reports
tests.reports.time = types.SimpleNamespace(time=lambda: 0.0)
sys.exit(pytest.main(sys.argv[1:], plugins=[tests.reports.Until(1.0)]))
"""
TWO = """
import tests.reports

def test_first():
    tests.reports.time.time = lambda: 2.0

def test_second(): ...
"""
NEAR = """
import sys, pytest
pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/planner/test_compile.py"])
print([name for name in ("torch", "transformers", "distributed", "vllm") if name in sys.modules])
"""


def python(code, *arguments, **environment):
    paths = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}",
        "PATH": "/usr/bin:/bin",
        "HOME": "/nowhere",
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=paths | environment, capture_output=True, text=True, timeout=120
    )


def test_without_processes_what_starts_one_or_imports_an_engine_is_skipped_and_the_rest_runs(
    tmp_path,
):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_uses.py").write_text(USES)
    options = [
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        f"--junitxml={tmp_path / 'report.xml'}",
        tmp_path,
    ]
    done = python(RUN, *options, MARK=str(tmp_path / "started"))
    outcomes = {}
    for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase"):
        found = case.find("skipped") if case.find("skipped") is not None else case.find("failure")
        outcomes[case.get("name")] = found if found is None else found.tag
    assert len(outcomes) == 15, done.stdout
    assert {name for name, outcome in outcomes.items() if outcome is None} == {
        "test_computes",
        "test_finds_a_library",
        "test_the_end",
    }
    assert [name for name, outcome in outcomes.items() if outcome == "failure"] == ["test_fails"]
    assert "1 failed, 3 passed, 11 skipped" in done.stdout, "each test counts once"
    assert not (tmp_path / "started").exists()


def test_the_last_lines_say_how_many_tests_were_skipped_and_why(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary")
    skips = [
        f"def test_{n}():\n    pytest.skip('no {'tree' if n % 3 else 'sea'} here')\n"
        for n in range(7)
    ]
    (folder / "test_here.py").write_text(
        "import pytest\n" + "".join(skips) + "def test_passes(): ..."
    )
    (folder / "test_absent.py").write_text(
        "import pytest\npytest.importorskip('no_such_package', reason='no package')"
    )
    done = python(
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
        "-q",
        "-p",
        "no:cacheprovider",
        folder,
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any("8 skipped, and why" in line for line in lines), done.stdout
    found = [line.partition(" (")[0] for line in lines if line.endswith(".py)")]
    assert found == ["4 no tree here", "3 no sea here", "1 no package"]


def test_a_test_of_the_planner_begins_without_torch_dask_or_an_engine():
    done = python(NEAR)
    assert done.returncode == 0, done.stderr
    assert "test_compile.py::" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_when_the_time_is_over_no_test_begins_and_those_left_out_are_counted(tmp_path):
    (tmp_path / "test_two.py").write_text(TWO)
    done = python(ENDS, "-q", "-rs", "-p", "no:cacheprovider", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "the time was over that SIIRL_TESTS_UNTIL names" in done.stdout
